//! The part of Python's pickle language that `torch.save` writes: a stack machine that builds
//! plain values and runs nothing. A pickle can name any function of Python and have it called;
//! here a name outside `GLOBALS` ends the reading at once, and those inside only make values.
//!
//! Values refer to lists, dicts and tensors by their place in one table instead of owning them.
//! That way a pickle may share, nest and even contain itself: nothing is copied, nothing leaks,
//! and dropping a deep nest does not recurse. Whoever walks the values bounds the walk.
//!
//! Left out: the text opcodes of protocol 0, integers beyond 64 bits, and everything that makes
//! objects of other classes.

mod globals;
mod op;

use std::collections::HashMap;
use std::path::Path;

pub use self::globals::PickleGlobal;
use self::globals::{GLOBALS, GlobalRole};
use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};

/// How errors call the format.
pub(crate) const FORMAT: &str = "PyTorch";

/// Chosen: a tensor takes about 35 opcodes (`state_dict.pt` of the tests), so that this reads
/// 100,000 tensors. Every opcode makes at most one value, so that it bounds the memory too.
const MAX_OPCODES: usize = 4_000_000;

/// Chosen: enough for the longest name in PyTorch; a hostile one shall not fill the screen.
const MAX_ASKED_CHARS: usize = 120;

/// Taken: `_rebuild_tensor_v3` takes the most.
const MAX_ARGUMENTS: usize = 8;

/// Taken: the newest protocol of `pickletools.py`, since Python 3.8.
const NEWEST_PROTOCOL: u8 = 5;

/// Runs a pickle to its end. `path` is for the errors.
pub fn read<'a>(bytes: &'a [u8], path: &'a Path) -> Result<Pickled<'a>> {
    let (stack, marks, memo, objects) = (Vec::new(), Vec::new(), HashMap::new(), Vec::new());
    let mut machine = Unpickler { bytes, path, at: 0, stack, marks, memo, objects };
    for _ in 0..MAX_OPCODES {
        let opcode = machine.byte()?;
        if opcode == op::STOP {
            let root = machine.pop()?;
            return Ok(Pickled { root, objects: machine.objects });
        }
        machine.step(opcode)?;
    }
    Err(machine.malformed(format!("more than {MAX_OPCODES} opcodes")))
}

/// What a pickle holds.
#[derive(Debug)]
pub struct Pickled<'a> {
    /// The one value it stands for.
    pub root: PickleValue<'a>,
    objects: Vec<PickleObject<'a>>,
}

impl<'a> Pickled<'a> {
    /// What a value refers to.
    pub fn object(&self, id: ObjectId) -> &PickleObject<'a> {
        &self.objects[id.0]
    }
}

/// What a pickle builds; text and bytes lie in the pickle itself.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // The names say it.
pub enum PickleValue<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Global(&'static PickleGlobal),
    Object(ObjectId),
}

/// The place of an object in its pickle's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectId(usize);

/// What values share and refer to.
#[derive(Clone, Debug, PartialEq)]
pub enum PickleObject<'a> {
    /// A tuple; never changes once it is there.
    Tuple(Vec<PickleValue<'a>>),
    /// A list or a set.
    List(Vec<PickleValue<'a>>),
    /// A dict, in the order it was filled.
    Dict(Vec<(PickleValue<'a>, PickleValue<'a>)>),
    /// A storage. Values lead here only where nobody has made a tensor of it.
    Storage(PickleStorage<'a>),
    /// A tensor.
    Tensor(PickleTensor<'a>),
}

/// Values in the archive that tensors are views of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PickleStorage<'a> {
    /// Names its entry in the archive.
    pub key: &'a str,
    /// What it counts in; bytes where it is untyped.
    pub dtype: FileDtype,
    /// How many it claims to hold, unchecked.
    pub numel: i64,
}

/// A tensor as the pickle describes it. Nothing is checked yet, and its shape is still in the
/// table: thousands of tensors may share one long tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PickleTensor<'a> {
    /// Where its values are.
    pub storage: PickleStorage<'a>,
    /// Its number format.
    pub dtype: FileDtype,
    /// Values before its first one.
    pub offset: i64,
    /// A tuple.
    pub shape: ObjectId,
    /// A tuple.
    pub strides: ObjectId,
}

struct Unpickler<'a> {
    bytes: &'a [u8],
    path: &'a Path,
    /// The next byte to read.
    at: usize,
    stack: Vec<PickleValue<'a>>,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: HashMap<u64, PickleValue<'a>>,
    objects: Vec<PickleObject<'a>>,
}

impl<'a> Unpickler<'a> {
    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            op::PROTO => self.check_protocol(),
            // Frames help whoever reads from a pipe; their length tells us nothing.
            op::FRAME => self.number(8).map(drop),
            op::MARK => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            op::POP => self.drop_top(),
            op::POP_MARK => self.pop_to_mark().map(drop),
            op::BINPUT => self.memoize(Some(1)),
            op::LONG_BINPUT => self.memoize(Some(4)),
            op::MEMOIZE => self.memoize(None),
            op::APPEND => {
                let item = self.pop()?;
                self.append(vec![item])
            }
            op::APPENDS | op::ADDITEMS => {
                let items = self.pop_to_mark()?;
                self.append(items)
            }
            op::SETITEM => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(&[key, value])
            }
            op::SETITEMS => {
                let items = self.pop_to_mark()?;
                self.set_items(&items)
            }
            op::BUILD => self.build(),
            _ => {
                let value = self.value(opcode)?;
                self.stack.push(value);
                Ok(())
            }
        }
    }

    /// The opcodes that put one value on the stack.
    fn value(&mut self, opcode: u8) -> Result<PickleValue<'a>> {
        Ok(match opcode {
            op::NONE => PickleValue::None,
            op::NEWTRUE => PickleValue::Bool(true),
            op::NEWFALSE => PickleValue::Bool(false),
            op::BININT => PickleValue::Int(i64::from((self.number(4)? as u32).cast_signed())),
            op::BININT1 => PickleValue::Int(self.number(1)?.cast_signed()),
            op::BININT2 => PickleValue::Int(self.number(2)?.cast_signed()),
            op::LONG1 => self.long(1)?,
            op::LONG4 => self.long(4)?,
            op::BINFLOAT => PickleValue::Float(f64::from_bits(self.number(8)?.swap_bytes())),
            op::SHORT_BINUNICODE => self.text(1)?,
            op::BINUNICODE => self.text(4)?,
            op::BINUNICODE8 => self.text(8)?,
            op::SHORT_BINSTRING => self.old_text(1)?,
            op::BINSTRING => self.old_text(4)?,
            op::SHORT_BINBYTES => PickleValue::Bytes(self.counted(1)?),
            op::BINBYTES => PickleValue::Bytes(self.counted(4)?),
            op::BINBYTES8 => PickleValue::Bytes(self.counted(8)?),
            op::BINGET => self.recall(1)?,
            op::LONG_BINGET => self.recall(4)?,
            op::GLOBAL | op::INST => self.global(opcode)?,
            op::STACK_GLOBAL => self.stack_global()?,
            op::BINPERSID => self.storage()?,
            op::REDUCE | op::NEWOBJ => self.call()?,
            _ => {
                let object = self.container(opcode)?;
                self.create(object)
            }
        })
    }

    /// The opcodes that make a tuple, list, set or dict.
    fn container(&mut self, opcode: u8) -> Result<PickleObject<'a>> {
        Ok(match opcode {
            op::EMPTY_TUPLE => PickleObject::Tuple(Vec::new()),
            op::TUPLE1 => PickleObject::Tuple(self.pop_several(1)?),
            op::TUPLE2 => PickleObject::Tuple(self.pop_several(2)?),
            op::TUPLE3 => PickleObject::Tuple(self.pop_several(3)?),
            op::TUPLE => PickleObject::Tuple(self.pop_to_mark()?),
            op::EMPTY_LIST | op::EMPTY_SET => PickleObject::List(Vec::new()),
            op::LIST => PickleObject::List(self.pop_to_mark()?),
            op::EMPTY_DICT => PickleObject::Dict(Vec::new()),
            op::DICT => {
                let items = self.pop_to_mark()?;
                PickleObject::Dict(self.pairs(&items)?)
            }
            _ => return Err(self.malformed(format!("unknown opcode {opcode:#04x}"))),
        })
    }

    fn check_protocol(&mut self) -> Result<()> {
        match self.byte()? {
            protocol if protocol <= NEWEST_PROTOCOL => Ok(()),
            protocol => Err(self.unsupported(format!(
                "pickle protocol {protocol}, the newest known is {NEWEST_PROTOCOL}"
            ))),
        }
    }

    // The bytes.

    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(count).ok().and_then(|count| rest.get(..count)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => {
                Err(self.malformed(format!("needs {count} bytes more, {} are left", rest.len())))
            }
        }
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    /// An unsigned number of `width` bytes, lowest first.
    fn number(&mut self, width: u64) -> Result<u64> {
        let bytes = self.take(width)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    }

    /// Bytes after their count, which takes `width` bytes itself.
    fn counted(&mut self, width: u64) -> Result<&'a [u8]> {
        let count = self.number(width)?;
        self.take(count)
    }

    /// A signed number of as many bytes as its count says.
    fn long(&mut self, width: u64) -> Result<PickleValue<'a>> {
        let bytes = self.counted(width)?;
        if bytes.len() > 8 {
            return Err(
                self.unsupported(format!("an integer of {} bytes, 8 are the most", bytes.len()))
            );
        }
        let negative = bytes.last().is_some_and(|highest| highest & 0x80 != 0);
        let mut padded = [if negative { 0xff } else { 0 }; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        Ok(PickleValue::Int(i64::from_le_bytes(padded)))
    }

    fn text(&mut self, width: u64) -> Result<PickleValue<'a>> {
        let bytes = self.counted(width)?;
        let text = str::from_utf8(bytes).map_err(|_| self.malformed("text is not UTF-8"))?;
        Ok(PickleValue::Text(text))
    }

    /// A `str` of Python 2, which was bytes that mostly meant text.
    fn old_text(&mut self, width: u64) -> Result<PickleValue<'a>> {
        let bytes = self.counted(width)?;
        Ok(str::from_utf8(bytes).map_or(PickleValue::Bytes(bytes), PickleValue::Text))
    }

    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n');
        let end = end.ok_or_else(|| self.malformed("a line without end"))?;
        self.at += end + 1;
        str::from_utf8(&rest[..end]).map_err(|_| self.malformed("a name is not UTF-8"))
    }

    // The stack. Nothing reaches below the newest mark.

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<PickleValue<'a>> {
        match self.stack.last() {
            Some(value) if self.stack.len() > self.floor() => Ok(*value),
            _ => Err(self.malformed("takes a value from an empty stack")),
        }
    }

    fn pop(&mut self) -> Result<PickleValue<'a>> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    /// The last `count` values, the oldest first.
    fn pop_several(&mut self, count: usize) -> Result<Vec<PickleValue<'a>>> {
        let held = self.stack.len() - self.floor();
        if held < count {
            return Err(self.malformed(format!("takes {count} values from a stack of {held}")));
        }
        Ok(self.stack.split_off(self.stack.len() - count))
    }

    fn pop_to_mark(&mut self) -> Result<Vec<PickleValue<'a>>> {
        let mark = self.marks.pop().ok_or_else(|| self.malformed("no mark on the stack"))?;
        Ok(self.stack.split_off(mark))
    }

    /// A mark counts as a value here, as in Python.
    fn drop_top(&mut self) -> Result<()> {
        if self.marks.last() == Some(&self.stack.len()) {
            self.marks.pop();
            return Ok(());
        }
        self.pop().map(drop)
    }

    /// Remembers the top value under the number that follows, or the next free one.
    fn memoize(&mut self, width: Option<u64>) -> Result<()> {
        let key = match width {
            Some(width) => self.number(width)?,
            None => self.memo.len() as u64,
        };
        let value = self.top()?;
        self.memo.insert(key, value);
        Ok(())
    }

    fn recall(&mut self, width: u64) -> Result<PickleValue<'a>> {
        let key = self.number(width)?;
        let value = self.memo.get(&key).copied();
        value.ok_or_else(|| {
            self.malformed(format!("recalls value {key}, which it never remembered"))
        })
    }

    // Objects.

    fn create(&mut self, object: PickleObject<'a>) -> PickleValue<'a> {
        self.objects.push(object);
        PickleValue::Object(ObjectId(self.objects.len() - 1))
    }

    fn object(&self, value: PickleValue<'a>) -> Option<&PickleObject<'a>> {
        match value {
            PickleValue::Object(id) => Some(&self.objects[id.0]),
            _ => None,
        }
    }

    fn pairs(&self, items: &[PickleValue<'a>]) -> Result<Vec<(PickleValue<'a>, PickleValue<'a>)>> {
        let (pairs, rest) = items.as_chunks();
        if !rest.is_empty() {
            return Err(self.malformed(format!("a dict of {} keys and values", items.len())));
        }
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    }

    fn append(&mut self, items: Vec<PickleValue<'a>>) -> Result<()> {
        if let PickleValue::Object(id) = self.top()?
            && let PickleObject::List(list) = &mut self.objects[id.0]
        {
            list.extend(items);
            return Ok(());
        }
        Err(self.malformed("appends to what is no list"))
    }

    fn set_items(&mut self, items: &[PickleValue<'a>]) -> Result<()> {
        let pairs = self.pairs(items)?;
        if let PickleValue::Object(id) = self.top()?
            && let PickleObject::Dict(dict) = &mut self.objects[id.0]
        {
            dict.extend(pairs);
            return Ok(());
        }
        Err(self.malformed("sets items of what is no dict"))
    }

    /// Attributes: a state dict carries its modules' versions this way. They hold no weights.
    fn build(&mut self) -> Result<()> {
        self.pop()?;
        let target = self.top()?;
        match self.object(target) {
            Some(PickleObject::Dict(_) | PickleObject::Tensor(_)) => Ok(()),
            _ => Err(self.malformed("sets attributes of what is neither dict nor tensor")),
        }
    }

    // Names and calls.

    fn global(&mut self, opcode: u8) -> Result<PickleValue<'a>> {
        let (module, name) = (self.line()?, self.line()?);
        let value = self.named(module, name)?;
        if opcode == op::INST {
            return Err(self.unsupported(format!("makes an instance of {module}.{name}")));
        }
        Ok(value)
    }

    fn stack_global(&mut self) -> Result<PickleValue<'a>> {
        match (self.pop()?, self.pop()?) {
            (PickleValue::Text(name), PickleValue::Text(module)) => self.named(module, name),
            _ => Err(self.malformed("names a function by what is no text")),
        }
    }

    fn named(&self, module: &str, name: &str) -> Result<PickleValue<'a>> {
        let known = GLOBALS.iter().find(|global| global.module == module && global.name == name);
        match known {
            Some(global) if global.role == GlobalRole::Refused => {
                Err(self.unsupported(format!("holds tensors made by {module}.{name}")))
            }
            Some(global) => Ok(PickleValue::Global(global)),
            None => {
                Err(WeightsError::Hostile { asked: asked(module, name), path: self.path.into() })
            }
        }
    }

    /// What `torch.save` puts in place of a storage.
    fn storage(&mut self) -> Result<PickleValue<'a>> {
        let identity = self.pop()?;
        let Some(PickleObject::Tuple(parts)) = self.object(identity) else {
            return Err(self.malformed("a storage is described by what is no tuple"));
        };
        let [
            PickleValue::Text("storage"),
            PickleValue::Global(class),
            PickleValue::Text(key),
            _,
            PickleValue::Int(count),
        ] = parts[..]
        else {
            return Err(self
                .malformed(format!("a storage is not described by these {} values", parts.len())));
        };
        let GlobalRole::Storage(dtype) = class.role else {
            return Err(self.malformed(format!("{} is no storage", class.full_name())));
        };
        Ok(self.create(PickleObject::Storage(PickleStorage { key, dtype, numel: count })))
    }

    /// Calls nothing: makes the value that the named function would.
    fn call(&mut self) -> Result<PickleValue<'a>> {
        let (given, callee) = (self.pop()?, self.pop()?);
        let PickleValue::Global(callee) = callee else {
            return Err(self.malformed("calls what is no function"));
        };
        let arguments = self.arguments(given)?;
        match (callee.role, &arguments[..]) {
            (GlobalRole::OrderedDict, []) => Ok(self.create(PickleObject::Dict(Vec::new()))),
            (GlobalRole::Device, [PickleValue::Text(kind)]) => Ok(PickleValue::Text(kind)),
            (GlobalRole::Device, [PickleValue::Text(_), PickleValue::Int(_)]) => Ok(given),
            (GlobalRole::Size, [sizes]) if self.tuple(*sizes).is_some() => Ok(*sizes),
            (GlobalRole::Parameter, [data, _, _] | [data, _, _, _]) if self.is_tensor(*data) => {
                Ok(*data)
            }
            (GlobalRole::Tensor, [storage, offset, shape, strides, _, _, flags @ ..]) => {
                self.check_flags(flags)?;
                self.tensor([*storage, *offset, *shape, *strides], None)
            }
            (
                GlobalRole::TypedTensor,
                [storage, offset, shape, strides, _, _, dtype, flags @ ..],
            ) => {
                self.check_flags(flags)?;
                self.tensor([*storage, *offset, *shape, *strides], Some(*dtype))
            }
            _ => Err(self.malformed(format!(
                "{} is called with {} values it does not take",
                callee.full_name(),
                arguments.len()
            ))),
        }
    }

    /// A short copy of a tuple, however long the tuple is and however often it is used.
    fn arguments(&self, given: PickleValue<'a>) -> Result<Vec<PickleValue<'a>>> {
        match self.tuple(given) {
            Some(id) => match &self.objects[id.0] {
                PickleObject::Tuple(items) if items.len() <= MAX_ARGUMENTS => Ok(items.clone()),
                _ => Err(self.malformed(format!("a call with more than {MAX_ARGUMENTS} values"))),
            },
            None => Err(self.malformed("a call without a tuple of values")),
        }
    }

    /// PyTorch can leave a conjugation or a sign to whoever reads the values, and says so here.
    fn check_flags(&self, flags: &[PickleValue<'a>]) -> Result<()> {
        let is_empty = |flag: &PickleValue<'a>| match self.object(*flag) {
            Some(PickleObject::Dict(items)) => items.is_empty(),
            _ => *flag == PickleValue::None,
        };
        if flags.iter().all(is_empty) {
            return Ok(());
        }
        Err(self.unsupported("holds a tensor that is yet to be conjugated or negated".into()))
    }

    fn tensor(
        &mut self,
        view: [PickleValue<'a>; 4],
        dtype: Option<PickleValue<'a>>,
    ) -> Result<PickleValue<'a>> {
        let [storage, offset, shape, strides] = view;
        let (
            Some(PickleObject::Storage(storage)),
            PickleValue::Int(offset),
            Some(shape),
            Some(strides),
        ) = (self.object(storage), offset, self.tuple(shape), self.tuple(strides))
        else {
            return Err(self.malformed("a tensor without storage, offset, shape or strides"));
        };
        let dtype = dtype.map_or(Ok(storage.dtype), |dtype| self.dtype(dtype))?;
        let tensor = PickleTensor { storage: *storage, dtype, offset, shape, strides };
        Ok(self.create(PickleObject::Tensor(tensor)))
    }

    fn dtype(&self, value: PickleValue<'a>) -> Result<FileDtype> {
        match value {
            PickleValue::Global(PickleGlobal { role: GlobalRole::Dtype(Some(dtype)), .. }) => {
                Ok(*dtype)
            }
            PickleValue::Global(global) => {
                Err(self.unsupported(format!("holds a tensor of {}", global.full_name())))
            }
            _ => Err(self.malformed("a tensor without number format")),
        }
    }

    fn tuple(&self, value: PickleValue<'a>) -> Option<ObjectId> {
        match value {
            PickleValue::Object(id) if matches!(self.objects[id.0], PickleObject::Tuple(_)) => {
                Some(id)
            }
            _ => None,
        }
    }

    fn is_tensor(&self, value: PickleValue<'a>) -> bool {
        matches!(self.object(value), Some(PickleObject::Tensor(_)))
    }

    // Errors.

    fn malformed(&self, problem: impl AsRef<str>) -> WeightsError {
        let problem = format!("data.pkl up to byte {}: {}", self.at, problem.as_ref());
        WeightsError::Malformed { format: FORMAT, problem, path: self.path.into() }
    }

    fn unsupported(&self, problem: String) -> WeightsError {
        WeightsError::Unsupported { format: FORMAT, problem, path: self.path.into() }
    }
}

/// What a hostile pickle names, fit to be printed: it may hold anything, also control characters.
fn asked(module: &str, name: &str) -> String {
    let full = module.chars().chain(['.']).chain(name.chars());
    full.take(MAX_ASKED_CHARS).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "model.pt";

    /// A value as Python would write it, but for tensors.
    fn shown(pickled: &Pickled, value: PickleValue) -> String {
        let all = |values: &[PickleValue]| {
            let shown: Vec<_> = values.iter().map(|value| shown(pickled, *value)).collect();
            shown.join(" ")
        };
        match value {
            PickleValue::Object(id) => match pickled.object(id) {
                PickleObject::Tuple(items) => format!("({})", all(items)),
                PickleObject::List(items) => format!("[{}]", all(items)),
                PickleObject::Dict(items) => {
                    let items: Vec<_> =
                        items.iter().map(|(key, item)| all(&[*key, *item])).collect();
                    format!("{{{}}}", items.join(", "))
                }
                PickleObject::Storage(storage) => format!("{storage:?}"),
                PickleObject::Tensor(tensor) => format!("{tensor:?}"),
            },
            PickleValue::Global(global) => global.full_name(),
            plain => format!("{plain:?}"),
        }
    }

    /// `expected` is the value, or the error's variant and a part of its text.
    fn check(case: &str, pickle: &[u8], expected: std::result::Result<&str, (&str, &str)>) {
        match (read(pickle, Path::new(PATH)), expected) {
            (Ok(pickled), Ok(expected)) => {
                assert_eq!(shown(&pickled, pickled.root), expected, "{case}");
            }
            (Err(error), Err((variant, says))) => {
                assert!(format!("{error:?}").starts_with(variant), "{case}: {error:?}");
                assert!(error.to_string().contains(says), "{case}: {error}");
            }
            (got, _) => panic!("{case}: {got:?}, not {expected:?}"),
        }
    }

    /// The bytes are what `pickle.dumps` of Python 3.11 gives.
    #[test]
    fn what_python_wrote_is_read() {
        let whole = r#"{Text("a") [Int(1) Int(-2) Int(300) Int(70000) Int(-5000000000)], Text("b") (Float(0.5) None Bool(true) Text("ü")), Int(3) {}, Text("c") (() (Int(1)) (Int(1) Int(2))), Text("d") {Text("x") Int(1)}}"#;
        let protocol_2 = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x05\x00\x0e\xfa\xd5\xfeeX\x01\x00\x00\x00bq\x03(G?\xe0\x00\x00\x00\x00\x00\x00N\x88X\x02\x00\x00\x00\xc3\xbcq\x04tq\x05K\x03}q\x06X\x01\x00\x00\x00cq\x07)K\x01\x85q\x08K\x01K\x02\x86q\x09\x87q\nX\x01\x00\x00\x00dq\x0bccollections\nOrderedDict\nq\x0c)Rq\x0dX\x01\x00\x00\x00xq\x0eK\x01su.";
        let protocol_5 = b"\x80\x05\x95\x7b\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x05\x00\x0e\xfa\xd5\xfee\x8c\x01b\x94(G?\xe0\x00\x00\x00\x00\x00\x00N\x88\x8c\x02\xc3\xbc\x94t\x94K\x03}\x94\x8c\x01c\x94)K\x01\x85\x94K\x01K\x02\x86\x94\x87\x94\x8c\x01d\x94\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94\x8c\x01x\x94K\x01su.";
        check("protocol 2", protocol_2, Ok(whole));
        check("protocol 5", protocol_5, Ok(whole));
        check(
            "set",
            b"\x80\x04\x95\x09\x00\x00\x00\x00\x00\x00\x00\x8f\x94(K\x01K\x02\x90.",
            Ok("[Int(1) Int(2)]"),
        );
        check(
            "bytes",
            b"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00C\x02\xff\x00\x94.",
            Ok("Bytes([255, 0])"),
        );
    }

    #[test]
    fn single_opcodes_are_read() {
        check("negative long", b"\x8a\x01\xff.", Ok("Int(-1)"));
        check("empty long", b"\x8a\x00.", Ok("Int(0)"));
        check("long with long count", b"\x8b\x02\x00\x00\x00\x00\x01.", Ok("Int(256)"));
        check("text of Python 2", b"U\x02ab.", Ok(r#"Text("ab")"#));
        check("bytes of Python 2", b"T\x01\x00\x00\x00\xff.", Ok("Bytes([255])"));
        check("text with long count", b"\x8d\x01\0\0\0\0\0\0\0a.", Ok(r#"Text("a")"#));
        check("list and dict from marks", b"((K\x01lNd.", Ok("{[Int(1)] None}"));
        check("dropped values and marks", b"K\x01(K\x02K\x031(0K\x040.", Ok("Int(1)"));
        check("far memo", b"K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff.", Ok("Int(7)"));
        check("number format", b"ctorch\nbfloat16\n.", Ok("torch.bfloat16"));
        check("device", b"ctorch\ndevice\nU\x04cuda\x85R.", Ok(r#"Text("cuda")"#));
        check(
            "numbered device",
            b"ctorch\ndevice\nU\x04cudaK\x01\x86R.",
            Ok(r#"(Text("cuda") Int(1))"#),
        );
        check("attributes", b"ccollections\nOrderedDict\n)\x81}b.", Ok("{}"));
    }

    #[test]
    fn code_is_refused_by_name() {
        check("function", b"cos\nsystem\n.", Err(("Hostile", "os.system")));
        check(
            "function, new style",
            b"\x8c\x05posix\x8c\x06system\x93.",
            Err(("Hostile", "posix.system")),
        );
        check("function, old style", b"(ios\nsystem\n.", Err(("Hostile", "os.system")));
        check("never called", b"cbuiltins\neval\n0N.", Err(("Hostile", "builtins.eval")));
        check("near miss", b"ctorch\nload\n.", Err(("Hostile", "torch.load")));
        check(
            "path through a module",
            b"ctorch\nos.system\n.",
            Err(("Hostile", "torch.os.system")),
        );
        check("class", b"cargparse\nNamespace\n)\x81.", Err(("Hostile", "argparse.Namespace")));
        check("terminal codes", b"cos\n\x1b[2J\n.", Err(("Hostile", "os.\\u{1b}[2J")));
        let long = [b"c".as_slice(), &b"x".repeat(100_000), b"\ny\n."].concat();
        check("long name", &long, Err(("Hostile", "asks for xxx")));
        assert!(read(&long, Path::new(PATH)).unwrap_err().to_string().len() < 300);
    }

    #[test]
    fn what_we_do_not_read_is_unsupported() {
        let refused = b"ctorch._utils\n_rebuild_qtensor\n.";
        check("quantised tensor", refused, Err(("Unsupported", "_rebuild_qtensor")));
        check("instance", b"(icollections\nOrderedDict\n.", Err(("Unsupported", "instance of")));
        check(
            "large integer",
            b"\x8a\x09\0\0\0\0\0\0\0\0\x01.",
            Err(("Unsupported", "9 bytes, 8")),
        );
        check("protocol", b"\x80\x06N.", Err(("Unsupported", "protocol 6")));
    }

    #[test]
    fn nonsense_is_malformed() {
        for (case, pickle, says) in [
            ("empty", b"".as_slice(), "needs 1 bytes more, 0 are left"),
            ("no end", b"N", "needs 1 bytes more"),
            ("stack underflow", b".", "empty stack"),
            ("underflow in a tuple", b"N\x87.", "takes 3 values from a stack of 1"),
            ("underflow at a mark", b"N(\x85.", "takes 1 values from a stack of 0"),
            ("top below a mark", b"](NNeq\x00(.", "empty stack"),
            ("no mark", b"Nt.", "no mark"),
            ("unknown opcode", b"\xfe.", "unknown opcode 0xfe"),
            ("opcode of protocol 0", b"I01\n.", "unknown opcode 0x49"),
            (
                "text beyond the end",
                b"X\xff\xff\xff\xffab",
                "needs 4294967295 bytes more, 2 are left",
            ),
            (
                "text beyond memory",
                b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffab",
                "bytes more, 2 are left",
            ),
            ("broken text", b"U\x01aX\x01\0\0\0\xff.", "not UTF-8"),
            ("no line", b"cos", "without end"),
            ("nothing remembered", b"h\x05.", "recalls value 5"),
            ("memo of nothing", b"q\x00.", "empty stack"),
            ("odd dict", b"(Nd.", "a dict of 1"),
            ("append to a tuple", b")Na.", "no list"),
            ("items of a list", b"]NNs.", "no dict"),
            ("attributes of a list", b"]Nb.", "neither dict nor tensor"),
            ("function without a name", b"NN\x93.", "no text"),
            ("call of a number", b"K\x01)R.", "no function"),
            ("call without values", b"ctorch\nSize\nNR.", "without a tuple"),
            ("call of a number format", b"ctorch\nint8\n)R.", "torch.int8 is called with 0"),
            ("filled dict", b"ccollections\nOrderedDict\n]\x85R.", "OrderedDict is called with 1"),
            ("size of a list", b"ctorch\nSize\n]\x85R.", "torch.Size is called"),
            ("storage of nothing", b"NQ.", "no tuple"),
            ("storage of another shape", b"NN\x86Q.", "these 2 values"),
            (
                "storage of no storage class",
                b"(U\x07storagectorch\nint8\nU\x010U\x03cpuK\x01tQ.",
                "torch.int8 is no storage",
            ),
            (
                "parameter of nothing",
                b"ctorch._utils\n_rebuild_parameter\nNNN\x87R.",
                "_rebuild_parameter is called",
            ),
            (
                "tensor of nothing",
                b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
                "without storage",
            ),
            (
                "many values",
                b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNNNNNtR.",
                "more than 8 values",
            ),
        ] {
            check(case, pickle, Err(("Malformed", says)));
        }
    }

    #[test]
    fn endless_pickles_are_stopped() {
        let mut pickle = b"N0".repeat(MAX_OPCODES / 2);
        pickle.push(op::STOP);
        check("opcodes", &pickle, Err(("Malformed", "more than 4000000 opcodes")));
        let nested = [b"]".repeat(1_000_000), b"a".repeat(999_999), b".".to_vec()].concat();
        assert!(read(&nested, Path::new(PATH)).is_ok(), "depth costs nothing here");
    }
}

//! Where the files of a tar archive lie: POSIX ustar and pax, and GNU's long names. Archives come from strangers: lengths are
//! held against the file before anything is believed, and what a name or a link points to outside is not used.
//!
//! ```text
//! 0     name, 100 bytes                      124  length, octal or, with the top bit, a number in base 256
//! 148   sum of the header's bytes, octal     156  type: 0 file, 1 2 links, 5 folder, L K x g say something of the next
//! 257   "ustar", then at 345 a prefix of the name
//! 512   the bytes, filled up to 512          two headers of zeros end it
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use machine::Bytes;

const BLOCK: u64 = 512;

/// Headers of an archive at most. Chosen: a hundred times those of a usual shard of `WebDataset`.
const MOST_HEADERS: usize = 1_000_000;

/// Longest name, and longest list of what pax says. Chosen: several times the longest path of Linux.
const MOST_SAID: u64 = 64 << 10;

/// A file in an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub start: u64,
    pub bytes: u64,
}

/// What an archive has.
#[derive(Debug, Default)]
pub(super) struct TarIndex {
    /// By their names. Of two with one name the later counts, as where it is unpacked.
    pub members: BTreeMap<PathBuf, Member>,
    /// What is not used, and why.
    pub refused: Vec<(PathBuf, &'static str)>,
}

impl TarIndex {
    /// Reads all headers.
    pub fn read(file: &File) -> io::Result<Self> {
        Headers { file, bytes: file.metadata()?.len(), at: 0, n: 0 }.index()
    }

    /// Names below a folder, without its own name.
    pub fn below<'a>(&'a self, folder: &'a Path) -> impl Iterator<Item = &'a Path> {
        let from = (Bound::Excluded(folder), Bound::Unbounded);
        let next = self.members.range::<Path, _>(from).map(|(name, _)| name);
        next.map_while(move |name| name.strip_prefix(folder).ok())
    }

    fn add(&mut self, name: &[u8], member: Member) {
        match clean(name) {
            Ok(name) => {
                self.members.insert(name, member);
            }
            Err(why) => self.refuse(name, why),
        }
    }

    fn refuse(&mut self, name: &[u8], why: &'static str) {
        // Joined with the archive's path, an absolute name would replace it.
        let shown = OsStr::from_bytes(name).to_string_lossy();
        self.refused.push((shown.trim_start_matches('/').into(), why));
    }
}

/// A name as a path below the archive.
fn clean(name: &[u8]) -> Result<PathBuf, &'static str> {
    let mut clean = PathBuf::new();
    for component in Path::new(OsStr::from_bytes(name)).components() {
        match component {
            Component::Normal(part) => clean.push(part),
            Component::CurDir => {}
            Component::ParentDir => {
                return Err("has a name that leads out of the archive, with `..`");
            }
            _ => return Err("has an absolute name, which leads out of the archive"),
        }
    }
    if clean.as_os_str().is_empty() { Err("has no name") } else { Ok(clean) }
}

/// An archive being looked through.
struct Headers<'a> {
    file: &'a File,
    bytes: u64,
    at: u64,
    n: usize,
}

/// What other headers say of the next one.
#[derive(Default)]
struct SaidBefore {
    name: Option<Vec<u8>>,
    bytes: Option<u64>,
    is_any: bool,
}

impl Headers<'_> {
    fn index(mut self) -> io::Result<TarIndex> {
        let (mut index, mut said) = (TarIndex::default(), SaidBefore::default());
        while let Some(header) = self.next()? {
            let own = header.bytes().ok_or_else(|| self.damaged("has no length"))?;
            match header.kind() {
                b'L' => said = SaidBefore { name: Some(self.text(own)?), is_any: true, ..said },
                b'x' => self.pax(own, &mut said)?,
                b'K' | b'g' => self.skip(own, b"what it says of others")?,
                kind => {
                    let SaidBefore { name, bytes, .. } = std::mem::take(&mut said);
                    let name = name.unwrap_or_else(|| header.name());
                    let member = Member { start: self.at, bytes: bytes.unwrap_or(own) };
                    match kind {
                        b'0' | b'7' | 0 => {
                            self.skip(member.bytes, &name)?;
                            // Before POSIX a folder was a file whose name ends so.
                            if !name.ends_with(b"/") {
                                index.add(&name, member);
                            }
                        }
                        // Neither has bytes, whatever length it names.
                        b'5' => {}
                        b'1' | b'2' => {
                            index.refuse(&name, "is a link, which is not followed in an archive");
                        }
                        b'3' | b'4' | b'6' => index.refuse(&name, "is a device or a pipe"),
                        _ => {
                            self.skip(member.bytes, &name)?;
                            index.refuse(&name, "is of a kind that only tar itself unpacks");
                        }
                    }
                }
            }
        }
        if said.is_any {
            return Err(self.damaged("ends behind a header that speaks of another file"));
        }
        Ok(index)
    }

    /// The next header; none at the end.
    fn next(&mut self) -> io::Result<Option<Header>> {
        if self.at >= self.bytes {
            return Ok(None);
        }
        let mut header = Header([0; BLOCK as usize]);
        let left = self.bytes - self.at;
        let n = left.min(BLOCK) as usize;
        self.file.read_exact_at(&mut header.0[..n], self.at)?;
        if self.at == 0 && header.0.starts_with(&[0x1f, 0x8b]) {
            let why = "is compressed with gzip, and images are read where they lie: gunzip it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if header.0 == [0; BLOCK as usize] {
            return Ok(None);
        }
        if left < BLOCK {
            return Err(self.damaged(&format!("ends within a header, after {}", Bytes(left))));
        }
        if !header.is_whole() {
            return Err(self.damaged("has a header whose sum is another than it says"));
        }
        self.n += 1;
        if self.n > MOST_HEADERS {
            let why =
                format!("has more than {MOST_HEADERS} headers: split it into several archives");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        self.at += BLOCK;
        Ok(Some(header))
    }

    /// Goes on behind so many bytes.
    fn skip(&mut self, bytes: u64, name: &[u8]) -> io::Result<()> {
        let left = self.bytes - self.at;
        if bytes > left {
            let name = OsStr::from_bytes(name).to_string_lossy();
            let [bytes, left] = [bytes, left].map(Bytes);
            let why = format!("is cut off: {name} is {bytes} long, and {left} are left");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        // The filling of the last one may be missing.
        self.at = (self.at + bytes.next_multiple_of(BLOCK)).min(self.bytes);
        Ok(())
    }

    /// Bytes that say something of the next header.
    fn said(&mut self, bytes: u64) -> io::Result<Vec<u8>> {
        if bytes > MOST_SAID {
            let [bytes, most] = [bytes, MOST_SAID].map(Bytes);
            return Err(self.damaged(&format!("has a name of {bytes}, most is {most}")));
        }
        let start = self.at;
        self.skip(bytes, b"a name")?;
        let mut said = vec![0; bytes as usize];
        self.file.read_exact_at(&mut said, start)?;
        Ok(said)
    }

    /// A name that ends with a zero.
    fn text(&mut self, bytes: u64) -> io::Result<Vec<u8>> {
        Ok(up_to_zero(&self.said(bytes)?).to_vec())
    }

    /// Lines `LENGTH KEY=VALUE`, where the length counts all of the line.
    fn pax(&mut self, bytes: u64, said: &mut SaidBefore) -> io::Result<()> {
        let all = self.said(bytes)?;
        said.is_any = true;
        let mut rest = all.as_slice();
        let broken = || self.damaged("has a pax header that is none");
        while !rest.is_empty() && rest[0] != 0 {
            let digits = rest.iter().position(|byte| *byte == b' ').ok_or_else(broken)?;
            let length = std::str::from_utf8(&rest[..digits]).ok().and_then(|it| it.parse().ok());
            let line = length.and_then(|length: usize| rest.get(digits + 1..length));
            let line = line.and_then(|line| line.strip_suffix(b"\n")).ok_or_else(broken)?;
            rest = &rest[digits + 1 + line.len() + 1..];
            let equals = line.iter().position(|byte| *byte == b'=').ok_or_else(broken)?;
            let value = &line[equals + 1..];
            match &line[..equals] {
                b"path" => said.name = Some(value.to_vec()),
                b"size" => {
                    let text = std::str::from_utf8(value).ok();
                    said.bytes = Some(text.and_then(|it| it.parse().ok()).ok_or_else(broken)?);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn damaged(&self, what: &str) -> io::Error {
        let why = format!("is damaged: {what}, {} from its start", Bytes(self.at));
        io::Error::new(io::ErrorKind::InvalidData, why)
    }
}

/// A header of 512 bytes.
struct Header([u8; BLOCK as usize]);

impl Header {
    fn kind(&self) -> u8 {
        self.0[156]
    }

    /// With the prefix that POSIX puts before long ones.
    fn name(&self) -> Vec<u8> {
        let (name, prefix) = (up_to_zero(&self.0[..100]), up_to_zero(&self.0[345..500]));
        // GNU's own header ends the word in another way, and has other things there.
        if prefix.is_empty() || &self.0[257..263] != b"ustar\0" {
            return name.to_vec();
        }
        [prefix, b"/", name].concat()
    }

    fn bytes(&self) -> Option<u64> {
        number(&self.0[124..136])
    }

    /// Whether the sum of its bytes, with spaces in the sum's place, is as it says; old programs summed signed bytes.
    fn is_whole(&self) -> bool {
        let bytes = self.0.iter().enumerate();
        let summed = bytes.map(|(at, byte)| if (148..156).contains(&at) { b' ' } else { *byte });
        let unsigned: u64 = summed.clone().map(u64::from).sum();
        let signed: i64 = summed.map(|byte| i64::from(byte.cast_signed())).sum();
        let said = number(&self.0[148..156]);
        said == Some(unsigned) || said.is_some_and(|said| i64::try_from(said) == Ok(signed))
    }
}

fn up_to_zero(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Octal digits between spaces and zeros, or a number in base 256.
fn number(field: &[u8]) -> Option<u64> {
    let (first, rest) = field.split_first()?;
    if *first >= 0x80 {
        let start = u64::from(first & 0x7f);
        return rest
            .iter()
            .try_fold(start, |sum, byte| sum.checked_mul(256)?.checked_add(u64::from(*byte)));
    }
    let text = std::str::from_utf8(up_to_zero(field)).ok()?.trim();
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

//! The characters map of a T5 tokenizer, checked before it is used: the crate that reads it does not
//! check its indices, and panics.
//!
//! ```text
//! u32 bytes of the trie │ trie: u32 … │ replacements: UTF-8, each ended by a zero byte
//! ```
//!
//! The trie is a double array (Darts). From unit `u` at `at`, the child for byte `c` is at
//! `at ^ offset(u) ^ c` if that one is labelled `c`; a unit that ends a key has its value, a place
//! among the replacements, at `at ^ offset(u)`.

use tokenizers::normalizers::Precompiled;

/// The map, or what is wrong with it.
pub fn read(base64: &str) -> Result<Precompiled, &'static str> {
    let bytes = base64::decode(base64).map_err(|_| "the characters map is not base64")?;
    let cut_short = "the characters map is cut short";
    let (n_bytes, rest) = bytes.split_first_chunk::<4>().ok_or(cut_short)?;
    let (trie, replacements) =
        rest.split_at_checked(u32::from_le_bytes(*n_bytes) as usize).ok_or(cut_short)?;
    let replacements =
        str::from_utf8(replacements).map_err(|_| "the characters map replaces by no UTF-8")?;
    let units: Vec<TrieUnit> = trie
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| TrieUnit(u32::from_le_bytes(*bytes) as usize))
        .collect();
    stays_inside(&units, replacements).ok_or("the characters map points outside itself")?;
    Precompiled::from(&bytes).map_err(|_| "the characters map cannot be read")
}

/// Walks every key, as lookups will.
fn stays_inside(units: &[TrieUnit], replacements: &str) -> Option<()> {
    let mut seen = vec![false; units.len()];
    let mut open = vec![units.first()?.offset()];
    while let Some(base) = open.pop() {
        for byte in 1..=255 {
            let at = base ^ byte;
            let unit = units.get(at)?;
            if unit.label() != byte || std::mem::replace(&mut seen[at], true) {
                continue;
            }
            let next = at ^ unit.offset();
            if unit.ends_key() {
                replacements.get(units.get(next)?.value()..)?;
            }
            open.push(next);
        }
    }
    Some(())
}

/// One unit of the trie; its bits are taken from Darts-clone, `double_array_unit`.
struct TrieUnit(usize);

impl TrieUnit {
    fn ends_key(&self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    fn value(&self) -> usize {
        self.0 & 0x7fff_ffff
    }

    /// A value has its topmost bit set, so it is nobody's label.
    fn label(&self) -> usize {
        self.0 & 0x8000_00ff
    }

    fn offset(&self) -> usize {
        self.0 >> 10 << ((self.0 & 0x200) >> 6)
    }
}

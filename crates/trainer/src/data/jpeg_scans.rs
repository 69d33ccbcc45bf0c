//! Whether a JPEG has data for all of its blocks. A decoder fills in what is missing and says nothing where a file was cut
//! and then ended properly, as programs that recover files do; the lower part would be trained on as grey.
//!
//! Only codes are read, no values (ITU-T T.81, annexes B, F and G). Of a progressive file, scans that refine coefficients
//! are left out: their codes depend on those before. What is wrong in another way is the decoder's to say.

use std::ops::RangeInclusive;

/// Most of each: tables of codes, components of a scan.
const MOST: usize = 4;
/// Pixels of a block's side, and its last coefficient.
const BLOCK: usize = 8;
const LAST: u8 = 63;
/// Bits that the longest code has.
const LONGEST: u32 = 16;

const HUFFMAN_TABLES: u8 = 0xc4;
const END: u8 = 0xd9;
const SCAN: u8 = 0xda;
const RESTART_INTERVAL: u8 = 0xdd;

/// Whether the file ends before its last block.
pub(super) fn is_cut(file: &[u8]) -> bool {
    let mut walk = ScanWalk { file, at: 2, ..ScanWalk::default() };
    walk.scans() == Err(Stop::Cut)
}

/// Why the walk ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The image ends, and blocks are missing.
    Cut,
    /// Something that is not known here.
    Other,
}

#[derive(Default)]
struct ScanWalk<'a> {
    file: &'a [u8],
    at: usize,
    frame: Option<JpegFrame>,
    /// Of DC coefficients, and of AC ones.
    tables: [[Option<CodeTable>; MOST]; 2],
    restart_interval: usize,
    /// Components of which there was a scan.
    begun: Vec<u8>,
}

struct JpegFrame {
    size: [usize; 2],
    is_progressive: bool,
    components: Vec<JpegComponent>,
}

#[derive(Clone, Copy)]
struct JpegComponent {
    id: u8,
    /// Blocks of an interleaved unit, across and down.
    sampling: [usize; 2],
}

struct JpegScan {
    components: Vec<ScanComponent>,
    n_units: usize,
    /// Which coefficients of each block it has.
    coefficients: RangeInclusive<usize>,
    is_progressive: bool,
    /// Whether it only adds bits to what was there before.
    is_refinement: bool,
}

/// A component in a scan: its blocks of a unit, and its tables.
struct ScanComponent {
    id: u8,
    n_blocks: usize,
    tables: [usize; 2],
}

impl<'a> ScanWalk<'a> {
    fn scans(&mut self) -> Result<(), Stop> {
        loop {
            let marker = self.marker().ok_or(Stop::Other)?;
            if marker == END {
                return self.check_begun();
            }
            // Without a length: restart markers, and those that are unused.
            if matches!(marker, 0x01 | 0xd0..=0xd8) {
                continue;
            }
            let segment = self.segment().ok_or(Stop::Other)?;
            match marker {
                HUFFMAN_TABLES => self.add_tables(segment).ok_or(Stop::Other)?,
                RESTART_INTERVAL => {
                    let interval = segment.first_chunk().ok_or(Stop::Other)?;
                    self.restart_interval = u16::from_be_bytes(*interval).into();
                }
                0xc0..=0xc2 => {
                    self.frame = Some(JpegFrame::read(marker, segment).ok_or(Stop::Other)?);
                }
                SCAN => self.scan(segment)?,
                _ => {}
            }
        }
    }

    /// That every component has a scan.
    fn check_begun(&self) -> Result<(), Stop> {
        let components = self.frame.iter().flat_map(|frame| &frame.components);
        let is_begun = components.map(|component| component.id).all(|id| self.begun.contains(&id));
        if is_begun { Ok(()) } else { Err(Stop::Cut) }
    }

    /// The next byte after 0xff that is neither data nor filling.
    fn marker(&mut self) -> Option<u8> {
        loop {
            self.at += self.file.get(self.at..)?.iter().position(|byte| *byte == 0xff)? + 1;
            let byte = *self.file.get(self.at)?;
            if ![0, 0xff].contains(&byte) {
                self.at += 1;
                return Some(byte);
            }
        }
    }

    fn segment(&mut self) -> Option<&'a [u8]> {
        let rest = self.file.get(self.at..)?;
        let length = usize::from(u16::from_be_bytes(*rest.first_chunk()?));
        self.at += length;
        rest.get(2..length)
    }

    fn add_tables(&mut self, mut segment: &[u8]) -> Option<()> {
        while let Some((about, rest)) = segment.split_first() {
            let lengths: &[u8; LONGEST as usize] = rest.first_chunk()?;
            let n_codes = lengths.iter().map(|n| usize::from(*n)).sum();
            let symbols = rest.get(lengths.len()..)?.get(..n_codes)?;
            let of_kind = self.tables.get_mut(usize::from(about >> 4))?;
            *of_kind.get_mut(usize::from(about & 15))? = Some(CodeTable::new(lengths, symbols)?);
            segment = &rest[lengths.len() + n_codes..];
        }
        Some(())
    }

    fn scan(&mut self, segment: &[u8]) -> Result<(), Stop> {
        let scan = self.frame.as_ref().and_then(|frame| frame.scan(segment)).ok_or(Stop::Other)?;
        if scan.is_refinement {
            return Ok(());
        }
        if *scan.coefficients.start() == 0 {
            self.begun.extend(scan.components.iter().map(|component| component.id));
        }
        let rest = self.file.get(self.at..).unwrap_or_default();
        let mut codes = CodeReader { rest, bits: 0, n_bits: 0 };
        let interval =
            if self.restart_interval == 0 { scan.n_units } else { self.restart_interval };
        for first in (0..scan.n_units).step_by(interval) {
            let is_complete =
                match self.units(&mut codes, &scan, interval.min(scan.n_units - first)) {
                    Err(Stop::Other) => return Err(Stop::Other),
                    // An interval may be damaged; decoders go on with the next.
                    units => units.is_ok(),
                };
            let is_last = first + interval >= scan.n_units;
            if (!is_last || !is_complete) && !codes.restart() {
                let is_end = codes.next_marker().is_none_or(|marker| marker == END);
                return if is_end { Err(Stop::Cut) } else { Ok(()) };
            }
        }
        Ok(())
    }

    /// Reads so many units.
    fn units(&self, codes: &mut CodeReader<'_>, scan: &JpegScan, n: usize) -> Result<(), Stop> {
        let mut unit = 0;
        while unit < n {
            unit += 1;
            for component in &scan.components {
                let tables = [0, 1].map(|kind| self.tables[kind][component.tables[kind]].as_ref());
                for _ in 0..component.n_blocks {
                    // Blocks that are empty take no data.
                    unit += codes.block(scan, tables)?;
                }
            }
        }
        Ok(())
    }
}

impl JpegFrame {
    fn read(marker: u8, segment: &[u8]) -> Option<Self> {
        let [bits, a, b, c, d, n] = *segment.first_chunk()?;
        let [height, width] = [[a, b], [c, d]].map(|two| usize::from(u16::from_be_bytes(two)));
        let component = |three: &[u8]| {
            let sampling = [three[1] >> 4, three[1] & 15].map(usize::from);
            let is_right = sampling.iter().all(|n| (1..=MOST).contains(n));
            is_right.then_some(JpegComponent { id: three[0], sampling })
        };
        let components = segment[6..].chunks_exact(3).map(component).collect::<Option<Vec<_>>>()?;
        // A height of zero is said later, by few.
        let is_right = bits == 8 && components.len() == usize::from(n) && width > 0 && height > 0;
        is_right.then_some(Self {
            size: [width, height],
            is_progressive: marker == 0xc2,
            components,
        })
    }

    fn scan(&self, segment: &[u8]) -> Option<JpegScan> {
        let (n, rest) = segment.split_first()?;
        let (named, more) = rest.split_at_checked(2 * usize::from(*n))?;
        let [first, last, steps] = *more.first_chunk()?;
        let most = |side: usize| self.components.iter().map(|of| of.sampling[side]).max();
        let most = [most(0)?, most(1)?];
        let mut n_units = [0, 1].map(|side| self.size[side].div_ceil(BLOCK * most[side]));
        let mut components = Vec::new();
        for two in named.chunks_exact(2) {
            let JpegComponent { id, sampling } =
                *self.components.iter().find(|component| component.id == two[0])?;
            let mut n_blocks = sampling[0] * sampling[1];
            if *n == 1 {
                // Alone, a component has no blocks that fill up a unit.
                let own = |side: usize| (self.size[side] * sampling[side]).div_ceil(most[side]);
                (n_units, n_blocks) = ([0, 1].map(|side| own(side).div_ceil(BLOCK)), 1);
            }
            let tables = [two[1] >> 4, two[1] & 15].map(usize::from);
            let is_right = tables.iter().all(|table| *table < MOST);
            components.push(is_right.then_some(ScanComponent { id, n_blocks, tables })?);
        }
        let is_progressive = self.is_progressive;
        let coefficients = if is_progressive {
            usize::from(first)..=usize::from(last.min(LAST))
        } else {
            0..=usize::from(LAST)
        };
        let is_right = !components.is_empty() && (first == 0 || components.len() == 1);
        is_right.then_some(JpegScan {
            components,
            n_units: n_units[0] * n_units[1],
            coefficients,
            is_progressive,
            is_refinement: is_progressive && steps >> 4 > 0,
        })
    }
}

/// Codes by their first sixteen bits: how long they are, none if zero, and what they stand for.
struct CodeTable(Vec<[u8; 2]>);

impl CodeTable {
    fn new(lengths: &[u8; LONGEST as usize], symbols: &[u8]) -> Option<Self> {
        let mut table = vec![[0; 2]; 1 << LONGEST];
        let (mut at, mut symbols) = (0, symbols.iter());
        for (length, n) in (1..).zip(lengths) {
            for symbol in symbols.by_ref().take((*n).into()) {
                let end = at + (1 << (LONGEST - length));
                table.get_mut(at..end)?.fill([length as u8, *symbol]);
                at = end;
            }
        }
        Some(Self(table))
    }
}

/// Bits of a scan up to its next marker.
struct CodeReader<'a> {
    rest: &'a [u8],
    /// The next ones, from the highest bit on.
    bits: u64,
    n_bits: u32,
}

impl CodeReader<'_> {
    /// Reads the codes of a block; how many blocks after it are empty.
    fn block(&mut self, scan: &JpegScan, [dc, ac]: [Option<&CodeTable>; 2]) -> Result<usize, Stop> {
        let (mut at, last) = scan.coefficients.clone().into_inner();
        if at == 0 {
            let size = self.symbol(dc)?;
            self.skip(size.into())?;
            at = 1;
            if scan.is_progressive {
                return Ok(0);
            }
        }
        while at <= last {
            let symbol = self.symbol(ac)?;
            let (run, size) = (symbol >> 4, symbol & 15);
            match (run, size) {
                (15, 0) => at += 16,
                // The end of several blocks: two to this power, and as many more as the bits say.
                (_, 0) if scan.is_progressive => return Ok((1 << run) - 1 + self.take(run.into())?),
                (_, 0) => return Ok(0),
                _ => {
                    self.skip(size.into())?;
                    at += usize::from(run) + 1;
                }
            }
        }
        Ok(0)
    }

    fn symbol(&mut self, table: Option<&CodeTable>) -> Result<u8, Stop> {
        self.fill();
        let [length, symbol] = table.ok_or(Stop::Other)?.0[(self.bits >> (64 - LONGEST)) as usize];
        match length {
            0 if self.n_bits >= LONGEST => Err(Stop::Other),
            0 => Err(Stop::Cut),
            length => self.skip(length.into()).map(|()| symbol),
        }
    }

    fn take(&mut self, n: u32) -> Result<usize, Stop> {
        self.fill();
        let value = self.bits.checked_shr(64 - n).unwrap_or(0);
        self.skip(n)?;
        Ok(value as usize)
    }

    fn skip(&mut self, n: u32) -> Result<(), Stop> {
        self.fill();
        self.n_bits = self.n_bits.checked_sub(n).ok_or(Stop::Cut)?;
        self.bits <<= n;
        Ok(())
    }

    fn fill(&mut self) {
        while self.n_bits <= 48 {
            let (byte, n) = match *self.rest {
                [0xff, 0, ..] => (0xff, 2),
                [0xff, ..] | [] => return,
                [byte, ..] => (byte, 1),
            };
            self.bits |= u64::from(byte) << (56 - self.n_bits);
            self.n_bits += 8;
            self.rest = &self.rest[n..];
        }
    }

    /// The marker that comes next, and where.
    fn find_marker(&self) -> Option<(usize, u8)> {
        let is_marker = |pair: &[u8]| pair[0] == 0xff && ![0, 0xff].contains(&pair[1]);
        let at = self.rest.windows(2).position(is_marker)?;
        Some((at, self.rest[at + 1]))
    }

    fn next_marker(&self) -> Option<u8> {
        self.find_marker().map(|(_, marker)| marker)
    }

    /// Goes on after the next marker, if that is one of a restart.
    fn restart(&mut self) -> bool {
        let Some((at, 0xd0..=0xd7)) = self.find_marker() else { return false };
        *self = CodeReader { rest: &self.rest[at + 2..], bits: 0, n_bits: 0 };
        true
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    const FILES: [&str; 9] = [
        "plain",
        "gray",
        "cmyk",
        "ycck",
        "subsampled",
        "subsampled_odd",
        "restarts",
        "progressive",
        "progressive_subsampled",
    ];

    fn file(name: &str) -> Vec<u8> {
        let images = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/images");
        fs::read(Path::new(images).join(name).with_extension("jpg")).unwrap()
    }

    /// Where the data of each scan begins.
    fn scans(file: &[u8]) -> Vec<usize> {
        let mut walk = ScanWalk { file, at: 2, ..ScanWalk::default() };
        let mut scans = Vec::new();
        while let Some(marker) = walk.marker() {
            let has_length = !matches!(marker, 0x01 | 0xd0..=0xd9);
            if has_length && walk.segment().is_some() && marker == SCAN {
                scans.push(walk.at);
            }
        }
        scans
    }

    #[test]
    fn a_file_that_was_cut_and_then_ended_lacks_blocks() {
        for name in FILES {
            let whole = file(name);
            assert!(!is_cut(&whole), "{name}");
            let scans = scans(&whole);
            // Of a progressive file the first scan; the last data byte may be filling.
            let end = scans.get(1).map_or(whole.len() - 2, |next| next - 60);
            for cut in (scans[0]..end - 1).step_by(5) {
                let ended = [&whole[..cut], &[0xff, END]].concat();
                assert!(is_cut(&ended), "{name} of {} bytes, cut at {cut}", whole.len());
            }
        }
    }

    #[test]
    fn any_bytes_come_to_an_end() {
        for name in FILES {
            let whole = file(name);
            for at in (2..whole.len()).step_by(11) {
                for change in [1, 0x80, 0xff] {
                    let mut changed = whole.clone();
                    changed[at] ^= change;
                    is_cut(&changed);
                }
                is_cut(&whole[..at]);
            }
        }
    }
}

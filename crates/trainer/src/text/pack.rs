//! Packs documents into sequences of one length. Depends on the documents, the seed and the length alone:
//! sequence n is the same in every run, and no state has to be saved.
//!
//! Documents come in an order that follows from the seed. One that fits into a sequence is kept whole;
//! a longer one is cut into pieces of a sequence each and what is left over. Pieces are put into the
//! fullest of a few open sequences that has room for them, which leaves less of it empty than one open
//! sequence would, and needs no more memory.
//!
//! In memory there are 8 bytes for each piece, and 4 for each sequence.

use std::ops::Range;

use super::store::TokenDocument;
use crate::data::batch_sampler::SequenceDraws;

/// Keep these random numbers apart from others of the same seed: "pack", "hold".
const PACK_PURPOSE: u64 = 0x7061_636b_0000_0000;
const HOLD_PURPOSE: u64 = 0x686f_6c64_0000_0000;

/// Sequences that are filled at once. Measured, 2026-11-16, a simulation of 20 000 documents of 2 tokens
/// to a sequence's length, uniform: 18 % padding with one, 4.5 % with 16, 2.0 % with 64,
/// 1.5 % with 128.
const N_OPEN: usize = 64;

/// Pieces of a long document that are held out together. Chosen: a book alone can then be divided,
/// and what is held out touches what is trained on in one piece of sixteen.
const SPLIT_PIECES: u32 = 16;

/// Tokens that a piece has at least: one, and one target.
const MIN_TOKENS: u32 = 2;

/// A part of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DocumentPiece {
    pub document: u32,
    /// Which of its stretches of a sequence's length.
    pub part: u32,
}

impl DocumentPiece {
    /// Its tokens within the document.
    pub fn range(self, document: &TokenDocument, length: usize) -> Range<u32> {
        let start = self.part * length as u32;
        start..document.length.min(start.saturating_add(length as u32))
    }
}

/// Which pieces each sequence is made of.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Packing {
    pieces: Vec<DocumentPiece>,
    /// Where the pieces of each sequence end.
    ends: Vec<u32>,
    /// Tokens in all of them.
    pub n_tokens: u64,
}

impl Packing {
    /// How many sequences there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The pieces of a sequence.
    pub fn pieces(&self, index: usize) -> &[DocumentPiece] {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.pieces[start as usize..self.ends[index] as usize]
    }

    fn close(&mut self, pieces: &[DocumentPiece]) {
        self.pieces.extend(pieces);
        self.ends.push(self.pieces.len() as u32);
    }
}

/// A sequence with room left.
struct PackingBin {
    room: u32,
    pieces: Vec<DocumentPiece>,
}

/// Packs the pieces that `is_meant`.
pub(super) fn pack(
    documents: &[TokenDocument],
    length: usize,
    seed: u64,
    is_meant: impl Fn(DocumentPiece) -> bool,
) -> Packing {
    let mut order: Vec<u32> = (0..documents.len() as u32).collect();
    SequenceDraws::new(seed ^ PACK_PURPOSE, 0).shuffle(&mut order);
    let mut packing = Packing::default();
    let mut open: Vec<PackingBin> = Vec::new();
    for document in order {
        for piece in pieces(documents, document, length).filter(|piece| is_meant(*piece)) {
            let n = piece.range(&documents[document as usize], length).len() as u32;
            packing.n_tokens += u64::from(n);
            put(&mut packing, &mut open, length as u32, piece, n);
        }
    }
    for bin in &open {
        packing.close(&bin.pieces);
    }
    packing
}

fn put(
    packing: &mut Packing,
    open: &mut Vec<PackingBin>,
    length: u32,
    piece: DocumentPiece,
    n: u32,
) {
    let fitting = open.iter().enumerate().filter(|(_, bin)| bin.room >= n);
    let fullest = fitting.min_by_key(|(_, bin)| bin.room).map(|(at, _)| at);
    let at = fullest.unwrap_or(open.len());
    if at == open.len() {
        open.push(PackingBin { room: length, pieces: Vec::new() });
    }
    open[at].room -= n;
    open[at].pieces.push(piece);
    let is_full = |bin: &PackingBin| bin.room < MIN_TOKENS;
    let closed = if is_full(&open[at]) {
        Some(at)
    } else if open.len() > N_OPEN {
        (0..open.len()).min_by_key(|at| open[*at].room)
    } else {
        None
    };
    if let Some(at) = closed {
        let bin = open.remove(at);
        packing.close(&bin.pieces);
    }
}

/// The pieces of a document that can be trained on. What is left over by one token has been asked
/// for at the end of the piece before.
fn pieces(
    documents: &[TokenDocument],
    document: u32,
    length: usize,
) -> impl Iterator<Item = DocumentPiece> {
    let of = documents[document as usize];
    let n = of.length.div_ceil(length as u32);
    let all = (0..n).map(move |part| DocumentPiece { document, part });
    all.filter(move |piece| piece.range(&of, length).len() as u32 >= MIN_TOKENS)
}

/// Which documents, or stretches of long ones, are held out.
pub(super) struct HoldOutSplit {
    seed: u64,
    share: f64,
    /// The smallest draw: held out whatever the share, so that the split is never empty.
    least: u32,
}

impl HoldOutSplit {
    pub fn new(documents: &[TokenDocument], length: usize, seed: u64, share: f64) -> Self {
        let mut split = Self { seed, share, least: 0 };
        let all = (0..documents.len() as u32).flat_map(|index| pieces(documents, index, length));
        let drawn = all.map(|piece| split.draw(documents, piece));
        split.least = drawn.min().unwrap_or(0);
        split
    }

    /// Follows from what the document says, so that other files beside it change nothing.
    pub fn is_held(&self, documents: &[TokenDocument], piece: DocumentPiece) -> bool {
        let draw = self.draw(documents, piece);
        f64::from(draw) < self.share * f64::from(u32::MAX) || draw == self.least
    }

    fn draw(&self, documents: &[TokenDocument], piece: DocumentPiece) -> u32 {
        let number = u64::from(documents[piece.document as usize].draw) << 32;
        compute::RandomSequence::new(
            self.seed ^ HOLD_PURPOSE,
            number | u64::from(piece.part / SPLIT_PIECES),
        )
        .word(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 100;

    fn documents(lengths: &[u32]) -> Vec<TokenDocument> {
        let mut start = 0;
        let document = |(draw, length): (u32, &u32)| {
            let document = TokenDocument { start, length: *length, draw: draw * 77_777 };
            start += u64::from(*length);
            document
        };
        (0..).zip(lengths).map(document).collect()
    }

    fn all(packing: &Packing) -> Vec<Vec<DocumentPiece>> {
        (0..packing.len()).map(|index| packing.pieces(index).to_vec()).collect()
    }

    #[test]
    fn every_token_is_in_one_sequence_and_none_is_too_long() {
        let lengths: Vec<u32> = (0..500).map(|n| 2 + n * 7919 % 353).collect();
        let documents = documents(&lengths);
        let packing = pack(&documents, LENGTH, 7, |_| true);
        let mut seen = vec![0_u32; documents.len()];
        for pieces in all(&packing) {
            let mut n_tokens = 0;
            for piece in pieces {
                let document = &documents[piece.document as usize];
                let range = piece.range(document, LENGTH);
                n_tokens += range.len();
                seen[piece.document as usize] += range.len() as u32;
                // Only what does not fit is cut.
                assert!(document.length > LENGTH as u32 || range == (0..document.length));
            }
            assert!(n_tokens <= LENGTH, "{n_tokens}");
        }
        // But for a last token alone.
        let expected: Vec<u32> = lengths
            .iter()
            .map(|length| if length % LENGTH as u32 == 1 { length - 1 } else { *length })
            .collect();
        assert_eq!(seen, expected);
        assert_eq!(packing.n_tokens, seen.iter().map(|n| u64::from(*n)).sum::<u64>());
        let room = packing.len() * LENGTH;
        assert!(packing.n_tokens as f64 > 0.95 * room as f64, "{} of {room}", packing.n_tokens);
    }

    #[test]
    fn documents_without_a_target_are_left_out() {
        assert_eq!(pack(&documents(&[0, 1, 1]), LENGTH, 7, |_| true), Packing::default());
        let packing = pack(&documents(&[1, 101, 2]), LENGTH, 7, |_| true);
        assert_eq!(packing.n_tokens, 102);
    }

    #[test]
    fn the_seed_decides_and_nothing_else() {
        let documents = documents(&[40; 60]);
        let packed = |seed| all(&pack(&documents, LENGTH, seed, |_| true));
        assert_eq!(packed(1), packed(1));
        assert_ne!(packed(1), packed(2));
    }

    #[test]
    fn what_is_held_out_is_not_trained_on() {
        let documents = documents(&[&[150_u32; 300][..], &[16_000]].concat());
        let split = HoldOutSplit::new(&documents, LENGTH, 7, 0.1);
        let held = pack(&documents, LENGTH, 7, |piece| split.is_held(&documents, piece));
        let train = pack(&documents, LENGTH, 7, |piece| !split.is_held(&documents, piece));
        let total = 300 * 150 + 16_000;
        assert_eq!(held.n_tokens + train.n_tokens, total);
        let share = held.n_tokens as f64 / total as f64;
        assert!((0.04..0.18).contains(&share), "{share}");
        // Both pieces of a document are on the same side.
        let sides: Vec<bool> = (0..300)
            .map(|document| {
                let [a, b] =
                    [0, 1].map(|part| split.is_held(&documents, DocumentPiece { document, part }));
                assert_eq!(a, b);
                a
            })
            .collect();
        // Documents beside it change nothing.
        let fewer = &documents[..200];
        let again = HoldOutSplit::new(fewer, LENGTH, 7, 0.1);
        let same = (0..200).filter(|document| {
            let piece = DocumentPiece { document: *document, part: 0 };
            again.is_held(fewer, piece) == sides[*document as usize]
        });
        assert!(same.count() >= 199);
    }

    #[test]
    fn one_book_can_be_divided_too() {
        let documents = documents(&[5_000]);
        let split = HoldOutSplit::new(&documents, LENGTH, 7, 0.001);
        let held = pack(&documents, LENGTH, 7, |piece| split.is_held(&documents, piece));
        assert!((1..=16).contains(&held.len()), "{}", held.len());
    }
}

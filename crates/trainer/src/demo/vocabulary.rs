//! The demo's tokenizer: pairs of letters merged until every word of its captions, and some more
//! that people may type, is one token (Sennrich et al., "Neural Machine Translation of Rare Words
//! with Subword Units", arXiv 1508.07909, in the form that CLIP uses). Any other text is spelled
//! with the bytes that it is made of.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::scene::{Background, Colour, TRIGGER};
use super::shape::DemoShape;

/// Tokens that a prompt may have with the two that frame it. The longest caption has 15.
pub const LENGTH: usize = 16;

/// What begins and ends a prompt.
const FRAME: [&str; 2] = ["<|startoftext|>", "<|endoftext|>"];
/// What ends a word in the vocabulary.
const END: &str = "</w>";

/// Words of captions besides the names of colours, shapes and backgrounds.
const OF_CAPTIONS: &str = "a an at background bottom large left on right small the top";

/// Words that people may add. Chosen: so that a text of one's own keeps to a few tokens.
const OF_OTHERS: &str = "and art beautiful big bird blurry bright car cat centre circles city cloud \
    cute dark day detailed diamond digital dog drawing face fire fish flower food for forest from \
    girl glowing gold gray grey hand happy head hearts high house icon image in is it lake light \
    line lines little logo low man many middle mountain neon night no of oil old one outline \
    painting paper pattern person photo picture pixel poster quality rings road round sea shape \
    shapes shiny silver sketch sky snow soft squares stars sticker style sun text three tree two \
    watercolor water white window with woman";

/// A vocabulary with the merges that lead to it.
pub struct DemoVocabulary {
    /// Every token, by its number.
    pub tokens: Vec<String>,
    /// Pairs that are merged, the first ones first.
    pub merges: Vec<(String, String)>,
}

impl DemoVocabulary {
    /// The demo's.
    pub fn new() -> Self {
        let merges = merges(words());
        let letters = alphabet();
        let ends = letters.iter().map(|letter| format!("{letter}{END}"));
        let merged = merges.iter().map(|(a, b)| format!("{a}{b}"));
        let mut tokens: Vec<String> = letters.iter().cloned().chain(ends).collect();
        // Two ways may lead to one token.
        for token in merged.chain(FRAME.map(str::to_owned)) {
            if !tokens.contains(&token) {
                tokens.push(token);
            }
        }
        Self { tokens, merges }
    }

    /// `vocab.json`
    pub fn vocabulary(&self) -> String {
        let numbered = self.tokens.iter().enumerate();
        let map: Map<String, Value> =
            numbered.map(|(number, token)| (token.clone(), number.into())).collect();
        Value::Object(map).to_string()
    }

    /// `merges.txt`
    pub fn merge_lines(&self) -> String {
        let lines = self.merges.iter().map(|(a, b)| format!("{a} {b}\n"));
        std::iter::once("#version: 0.2\n".to_owned()).chain(lines).collect()
    }

    /// The numbers of the tokens that begin and end a prompt.
    pub fn frame(&self) -> [usize; 2] {
        [self.tokens.len() - 2, self.tokens.len() - 1]
    }
}

/// All words, in the order of the alphabet, each once.
fn words() -> Vec<String> {
    let names = Colour::ALL.iter().map(|colour| colour.name);
    let names = names.chain(Background::ALL.iter().map(|background| background.name));
    let names = names.chain(DemoShape::ALL.iter().map(|shape| shape.name()));
    let lists = names.chain([OF_CAPTIONS, OF_OTHERS, TRIGGER]);
    let mut words: Vec<String> = lists.flat_map(str::split_whitespace).map(str::to_owned).collect();
    words.sort();
    words.dedup();
    words
}

/// Merges the most frequent pair, again and again, until each word is one piece. Texts are cut by
/// the same merges in the same order, so each of these words comes out whole.
fn merges(words: Vec<String>) -> Vec<(String, String)> {
    let spelled = |word: String| {
        let mut letters: Vec<String> = word.chars().map(String::from).collect();
        letters.last_mut().expect("words have letters").push_str(END);
        letters
    };
    let mut words: Vec<Vec<String>> = words.into_iter().map(spelled).collect();
    let mut merges = Vec::new();
    while let Some(pair) = most_frequent(&words) {
        for word in &mut words {
            merge(word, &pair.0, &pair.1);
        }
        merges.push(pair);
    }
    merges
}

/// Among equals the last in the alphabet's order.
fn most_frequent(words: &[Vec<String>]) -> Option<(String, String)> {
    let mut counts: BTreeMap<(&String, &String), usize> = BTreeMap::new();
    for pair in words.iter().flat_map(|word| word.windows(2)) {
        *counts.entry((&pair[0], &pair[1])).or_default() += 1;
    }
    let (pair, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    Some((pair.0.clone(), pair.1.clone()))
}

fn merge(word: &mut Vec<String>, first: &str, second: &str) {
    let mut at = 0;
    while at + 1 < word.len() {
        if word[at] == first && word[at + 1] == second {
            let second = word.remove(at + 1);
            word[at].push_str(&second);
        }
        at += 1;
    }
}

/// A printable letter for every byte, in the order that CLIP has them: first those that are
/// printable themselves.
fn alphabet() -> Vec<String> {
    let is_printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let printable = (0..256).filter(|byte| is_printable(*byte));
    let n_others = (0..256).filter(|byte| !is_printable(*byte)).count() as u32;
    let others = (0..n_others).map(|index| 256 + index);
    let letter = |code| char::from_u32(code).expect("below the surrogates").to_string();
    printable.chain(others).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::data::DemoStyle;
    use crate::demo::kit;
    use crate::demo::scene::Scene;
    use crate::model::encoder::tokenizer::PromptTokenizer;

    fn tokenizer() -> (tempfile::TempDir, PromptTokenizer) {
        let folder = tempfile::tempdir().unwrap();
        kit::write_tokenizer(folder.path(), &DemoVocabulary::new(), FRAME[1]).unwrap();
        let tokenizer = PromptTokenizer::open(folder.path(), LENGTH).unwrap();
        (folder, tokenizer)
    }

    #[test]
    fn every_caption_fits_with_a_token_per_word() {
        let (_folder, tokenizer) = tokenizer();
        for style in [DemoStyle::Flat, DemoStyle::Neon] {
            for index in 0..300 {
                let caption = Scene::new(style, 3, index).caption;
                let n_words = caption.replace(',', " ,").split_whitespace().count();
                let encoded = tokenizer.encode(&caption);
                assert_eq!((encoded.n_tokens, encoded.dropped), (n_words + 2, 0), "{caption}");
            }
        }
    }

    #[test]
    fn any_text_has_tokens() {
        let (_folder, tokenizer) = tokenizer();
        let [_, end] = DemoVocabulary::new().frame().map(|number| number as u32);
        let encoded = tokenizer.encode("zürich 東京 🦊");
        assert!(!encoded.ids[1..encoded.n_tokens - 1].contains(&end), "{:?}", encoded.ids);
        assert!(tokenizer.vocab_size() == DemoVocabulary::new().tokens.len());
    }
}

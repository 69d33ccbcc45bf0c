//! Text out of tokens that come one by one, as a model gives them. A letter may take several tokens:
//! what is no whole text yet is held back.

use super::Tokenizer;

/// Chosen: no letter takes more bytes, so what is no text after as many tokens never becomes one.
const MOST_HELD: usize = 4;

/// What stands for bytes that are no text.
const BROKEN: char = '\u{fffd}';

/// Takes tokens, gives text as soon as it is whole.
pub struct TokenDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens whose text was given, since some texts depend on what stands before, then
    /// those that are held back.
    ids: Vec<u32>,
    /// How many of them were given.
    n_given: usize,
}

impl<'a> TokenDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), n_given: 0 }
    }

    /// The text that is certain now; empty while a letter is not whole.
    pub fn push(&mut self, id: u32) -> String {
        self.ids.push(id);
        let whole = self.held().filter(|text| !text.ends_with(BROKEN));
        let is_hopeless = self.ids.len() - self.n_given >= MOST_HELD;
        let text = match whole {
            Some(text) => text,
            None if is_hopeless => self.alone(),
            None => return String::new(),
        };
        self.ids.drain(..self.n_given);
        self.n_given = self.ids.len();
        text
    }

    /// What was held back to the end.
    pub fn finish(self) -> String {
        self.held().unwrap_or_else(|| self.alone())
    }

    /// The text of the tokens that were not given; none where they change what was given, as the
    /// first byte of a letter does after letters that were bytes too.
    fn held(&self) -> Option<String> {
        let given = self.tokenizer.decode(&self.ids[..self.n_given]);
        let all = self.tokenizer.decode(&self.ids);
        all.strip_prefix(&given).map(Into::into)
    }

    /// The same as if nothing stood before.
    fn alone(&self) -> String {
        self.tokenizer.decode(&self.ids[self.n_given..])
    }
}

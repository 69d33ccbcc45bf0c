//! What a model remembers of a text it has seen: the keys and values of every block, in memory that
//! is taken once for the longest text. One text at a time.

use compute::{Device, Dtype, Tensor};

use super::Config;
use crate::error::{Result, TrainerError};

/// The keys and values of the tokens so far.
pub struct Cache {
    /// Of each block, keys and values: [most tokens, width of all heads].
    pub(super) blocks: Vec<[Tensor; 2]>,
    n_tokens: usize,
    most: usize,
}

impl Cache {
    /// Empty, with room for the most tokens there will be.
    pub(super) fn new(device: &Device, config: &Config, dtype: Dtype, most: usize) -> Result<Self> {
        let sizes = [most, config.num_key_value_heads * config.head_dim];
        let room = || device.zeros(sizes, dtype);
        let blocks = (0..config.num_hidden_layers).map(|_| Ok([room()?, room()?]));
        Ok(Self { blocks: blocks.collect::<Result<_>>()?, n_tokens: 0, most })
    }

    /// Tokens that it holds.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Goes on with another length of the same text: a rehearsal need not see every token.
    pub(crate) fn skip_to(&mut self, n_tokens: usize) {
        self.n_tokens = n_tokens.min(self.most);
    }

    /// Makes sure that so many more have room.
    pub(super) fn check_room(&self, n: usize) -> Result<()> {
        let all = self.n_tokens + n;
        if all <= self.most {
            return Ok(());
        }
        Err(TrainerError::Request {
            problem: format!("a text of {all} tokens in room for {}", self.most),
            hint: "make the room as large as the longest text",
        })
    }
}

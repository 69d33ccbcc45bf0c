//! The KV cache: keys and values of every block, allocated once for the longest text. Of one text, or of several that begin
//! with the same prompt and have the same length: a group.
//!
//! The keys of a token of all texts of a group stand side by side. So the next tokens are written in one piece, and
//! attention takes the group for one text with more heads.

use compute::{Device, Dtype, Tensor};

use super::LlamaConfig;
use crate::error::{Result, TrainerError};

/// The keys and values of the tokens so far.
pub struct KvCache {
    /// Of each block, keys and values: [most tokens, texts x width of all heads].
    pub(super) blocks: Vec<[Tensor; 2]>,
    pub(super) n_texts: usize,
    n_tokens: usize,
    max_tokens: usize,
    /// How far the position of the next token is behind the number of tokens: an image takes more tokens than positions.
    position_lag: usize,
}

impl KvCache {
    /// Empty, with room for the most tokens there will be.
    pub(crate) fn new(
        device: &Device,
        config: &LlamaConfig,
        dtype: Dtype,
        most: usize,
    ) -> Result<Self> {
        Self::of_group(device, config, dtype, most, 1)
    }

    /// The same for several texts that begin with the same prompt.
    pub(crate) fn of_group(
        device: &Device,
        config: &LlamaConfig,
        dtype: Dtype,
        most: usize,
        n_texts: usize,
    ) -> Result<Self> {
        let sizes = [most, n_texts * config.num_key_value_heads * config.head_dim];
        let room = || device.zeros(sizes, dtype);
        let blocks = (0..config.num_hidden_layers).map(|_| Ok([room()?, room()?]));
        let blocks = blocks.collect::<Result<_>>()?;
        Ok(Self { blocks, n_texts, n_tokens: 0, max_tokens: most, position_lag: 0 })
    }

    /// Tokens that it holds.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Tokens of the longest text.
    pub(super) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Tokens that there is room for.
    pub(crate) fn room(&self) -> usize {
        self.max_tokens - self.n_tokens
    }

    /// The rotary position of the next token.
    pub(super) fn next_position(&self) -> usize {
        self.n_tokens.saturating_sub(self.position_lag)
    }

    /// Says which position the next token has, where that is not the number of tokens before it.
    pub(super) fn set_next_position(&mut self, position: usize) {
        self.position_lag = self.n_tokens.saturating_sub(position);
    }

    /// Forgets all of it, for another text.
    pub(crate) fn clear(&mut self) {
        (self.n_tokens, self.position_lag) = (0, 0);
    }

    /// Continues at another length of the same text: a dry run need not compute every token, and what stands behind is
    /// forgotten.
    pub(crate) fn skip_to(&mut self, n_tokens: usize) {
        self.n_tokens = n_tokens.min(self.max_tokens);
    }

    /// Checks that there is room for `n` more.
    pub(super) fn check_room(&self, n: usize) -> Result<()> {
        let all = self.n_tokens + n;
        if all <= self.max_tokens {
            return Ok(());
        }
        Err(TrainerError::Request {
            problem: format!("a text of {all} tokens, the KV cache holds {}", self.max_tokens),
            hint: "make the cache as large as the longest text",
        })
    }
}

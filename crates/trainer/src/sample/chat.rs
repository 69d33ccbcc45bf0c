//! A conversation with a language model. Keys and values of what was said stay in the cache: a turn computes only what
//! is new. Texts are read in pieces whose sizes are powers of two, each of which a dry run has seen, so that the arena of
//! the plan is enough for any conversation that the cache has room for.

use compute::{Device, DeviceKind, Params, Quantisation};

use super::StageMemory;
use super::text::{
    GenerationRequest, GenerationResult, OnToken, TextGenerator, TokenPredictor, generate,
};
use super::token_sampler::TokenSampler;
use crate::cost::{self, nearest_fitting};
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::{Llama, LlamaConfig};
use crate::text::{ChatTemplate, Message, Tokenizer};

/// The most tokens that are read at once. Chosen: enough to keep a device busy, few enough to need little memory.
const PIECE: usize = 512;

/// Tokens of a conversation unless more are asked for. Chosen: an hour's talk, and a cache of a hundred megabytes for a
/// model of 1B.
const DEFAULT_CONTEXT: usize = 4096;

/// The longest conversation of a model: what was asked for, or as long as usual.
pub fn context_length(config: &LlamaConfig, asked: Option<usize>) -> Result<usize> {
    let most = config.max_position_embeddings;
    match asked {
        None => Ok(most.min(DEFAULT_CONTEXT)),
        Some(asked) if asked > most => Err(TrainerError::Request {
            problem: format!("a context of {asked} tokens, the model is made for {most}"),
            hint: "ask for fewer",
        }),
        Some(asked) if asked < 2 => Err(TrainerError::Request {
            problem: format!("a context of {asked} tokens"),
            hint: "a question and an answer take 2 at least; leave it out for as many as usual",
        }),
        Some(asked) => Ok(asked),
    }
}

/// Peak bytes of loading a model and talking to it, by a dry run. If that is more than `limit`, the error names the nearest
/// change that would fit.
pub fn plan_chat(
    base: &LanguageModel,
    precision: Precision,
    context: usize,
    kind: DeviceKind,
    limit: usize,
) -> Result<usize> {
    let peak_bytes = peak(base, precision, context, kind)?;
    if peak_bytes <= limit {
        return Ok(peak_bytes);
    }
    let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
    let (half, quarter) = (context / 2, context / 4);
    let candidates = [
        (format!("--context {half}"), (precision, half)),
        ("--quantise nf4".to_owned(), (quantised, context)),
        (format!("--quantise nf4 --context {quarter}"), (quantised, quarter)),
    ];
    let remedy = nearest_fitting(limit, &candidates, |(precision, context), _| {
        peak(base, *precision, (*context).max(2), kind)
    })?;
    Err(cost::too_large(StageMemory { name: "chat", peak_bytes }, limit, remedy))
}

fn peak(
    base: &LanguageModel,
    precision: Precision,
    context: usize,
    kind: DeviceKind,
) -> Result<usize> {
    let device = Device::meta(kind, cost::UNLIMITED);
    let (model, adapters) = base.load_adapted(&device, precision, &|_| true)?;
    let mut session = ChatSession::new(&device, &model, &adapters.params, context)?;
    let mut size = PIECE.min(context.next_power_of_two());
    while size > 0 {
        if let Some(before) = context.checked_sub(size) {
            session.generator.skip_to(before);
            session.generator.logits(&vec![0; size])?;
        }
        size /= 2;
    }
    Ok(device.usage().extent)
}

/// A loaded model, and what it has read so far.
pub struct ChatSession<'a> {
    generator: TextGenerator<'a>,
    /// The tokens in the cache.
    read: Vec<u32>,
    context: usize,
}

impl<'a> ChatSession<'a> {
    /// With room for conversations of `context` tokens.
    pub fn new(
        device: &'a Device,
        model: &'a Llama,
        params: &'a Params,
        context: usize,
    ) -> Result<Self> {
        let cache = model.new_cache(device, context)?;
        let generator = TextGenerator { device, model, params, cache };
        Ok(Self { generator, read: Vec::new(), context })
    }

    /// The most tokens of a conversation.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens of the conversation so far.
    pub fn n_read(&self) -> usize {
        self.read.len()
    }

    /// Answers a conversation, given as tokens up to where the answer begins. Only what differs from the last one is read.
    /// The answer ends where the context does.
    pub fn answer(
        &mut self,
        conversation: &[u32],
        max_tokens: usize,
        sampler: TokenSampler,
        is_end: &dyn Fn(u32) -> bool,
        take: OnToken<'_>,
    ) -> Result<GenerationResult> {
        let room = self.context.saturating_sub(conversation.len());
        let whole = GenerationRequest {
            prompt: conversation.to_vec(),
            max_tokens: max_tokens.min(room),
            sampler,
        };
        whole.check(self.generator.model.config())?;
        let same = self.read.iter().zip(conversation).take_while(|(a, b)| a == b).count();
        // The last token is read again if nothing is new: its logits were not kept.
        let kept = same.min(conversation.len() - 1);
        self.skip_to(kept);
        let request = GenerationRequest { prompt: conversation[kept..].to_vec(), ..whole };
        let device = self.generator.device;
        generate(device, self, &request, is_end, take)
    }
}

impl TokenPredictor for ChatSession<'_> {
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (mut left, mut logits) = (tokens, Vec::new());
        while !left.is_empty() {
            let size = PIECE.min(1 << left.len().ilog2());
            let (piece, rest) = left.split_at(size);
            logits = self.generator.logits(piece)?;
            self.read.extend_from_slice(piece);
            left = rest;
        }
        Ok(logits)
    }

    fn skip_to(&mut self, n_tokens: usize) {
        self.read.truncate(n_tokens);
        self.generator.skip_to(n_tokens);
    }
}

/// Leaves out the oldest questions with their answers until a conversation takes no more than `most` tokens. Returns its
/// tokens; the last question always stays.
pub fn fit(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &mut Vec<Message>,
    most: usize,
) -> Result<Vec<u32>> {
    loop {
        let tokens = template.encode(tokenizer, messages)?;
        if tokens.len() <= most {
            return Ok(tokens);
        }
        let is_question = |message: &Message| message.role == "user";
        let mut questions = (0..messages.len()).filter(|at| is_question(&messages[*at]));
        let (Some(first), Some(second)) = (questions.next(), questions.next()) else {
            return Err(TrainerError::Request {
                problem: format!(
                    "the question takes {} tokens, there is room for {most}",
                    tokens.len()
                ),
                hint: "shorten it or the system message, or give a larger --context",
            });
        };
        messages.drain(first..second);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use compute::Dtype;

    use super::*;
    use crate::model::llama::tests::{golden, ids};
    use crate::sample::text::GenerativeBase;

    const PLAIN: Precision = Precision::plain(Dtype::F32);
    const CONTEXT: usize = 200;

    /// Tokens of an answer, which is chosen greedily.
    fn answered(session: &mut ChatSession<'_>, conversation: &[u32], n: usize) -> Vec<u32> {
        let mut text = Vec::new();
        let take = &mut |token| {
            text.push(token);
            true
        };
        session.answer(conversation, n, TokenSampler::greedy(), &|_| false, take).unwrap();
        text
    }

    #[test]
    fn an_answer_is_that_of_a_model_that_reads_all_of_it() {
        let base = LanguageModel::open(&golden("qwen3")).unwrap();
        let device = Device::cpu(2, 64 << 20).unwrap();
        let (model, adapters) = base.load_adapted(&device, PLAIN, &|_| true).unwrap();
        let tokens = ids("qwen3", "in.input_ids");
        let mut session = ChatSession::new(&device, &model, &adapters.params, CONTEXT).unwrap();
        let first = answered(&mut session, &tokens[..9], 12);
        // The answer is part of the next question, as it was given or with another end.
        let goes_on = [&tokens[..9], &first, &tokens[9..14]].concat();
        let differs = [&tokens[..9], &first[..4], &tokens[3..20]].concat();
        for conversation in [goes_on, differs.clone(), differs, tokens[..2].to_vec()] {
            let prompt = conversation.clone();
            let request =
                GenerationRequest { prompt, max_tokens: 16, sampler: TokenSampler::greedy() };
            let mut expected = Vec::new();
            let take = &mut |token| {
                expected.push(token);
                true
            };
            let params = &adapters.params;
            base.generate(&device, &model, params, &request, &|_| false, take).unwrap();
            assert_eq!(answered(&mut session, &conversation, 16), expected);
            assert_eq!(session.n_read(), conversation.len() + 15);
        }
    }

    #[test]
    fn only_what_is_new_is_read() {
        let base = LanguageModel::open(&golden("llama")).unwrap();
        let device = Device::cpu(1, 64 << 20).unwrap();
        let (model, adapters) = base.load_adapted(&device, PLAIN, &|_| true).unwrap();
        let mut session = ChatSession::new(&device, &model, &adapters.params, CONTEXT).unwrap();
        session.logits(&[1, 2, 3]).unwrap();
        // A token that was never there: whoever reads only what is new does not notice.
        session.read[1] = 9;
        let of_others = answered(&mut session, &[1, 9, 3, 4], 8);
        let mut fresh = ChatSession::new(&device, &model, &adapters.params, CONTEXT).unwrap();
        assert_eq!(of_others, answered(&mut fresh, &[1, 2, 3, 4], 8));
        assert_ne!(of_others, answered(&mut fresh, &[1, 9, 3, 4], 8));
    }

    #[test]
    fn a_conversation_takes_what_was_planned() {
        let base = LanguageModel::open(&golden("qwen2")).unwrap();
        for (context, dtype) in [(120, Dtype::F32), (33, Dtype::Bf16), (2, Dtype::F32)] {
            let precision = Precision::plain(dtype);
            let kind = DeviceKind::cpu(2);
            let planned = plan_chat(&base, precision, context, kind, usize::MAX).unwrap();
            let device = Device::cpu(2, planned).unwrap();
            let (model, adapters) = base.load_adapted(&device, precision, &|_| true).unwrap();
            let mut session = ChatSession::new(&device, &model, &adapters.params, context).unwrap();
            for n in (1..context).step_by(7) {
                answered(&mut session, &vec![n as u32; n], 3);
            }
            answered(&mut session, &vec![5; context - 1], 3);
            assert!(device.usage().extent <= planned);
            let refused = plan_chat(&base, precision, context, kind, planned - 1);
            let error = refused.unwrap_err().to_string();
            assert!(error.starts_with("chat does not fit: needs"), "{error}");
        }
    }

    #[test]
    fn a_context_is_no_longer_than_the_model_is_made_for() {
        let config = LanguageModel::open(&golden("llama")).unwrap().config;
        assert_eq!(context_length(&config, None).unwrap(), 256);
        assert_eq!(context_length(&config, Some(100)).unwrap(), 100);
        for (asked, says) in [(257, "257 tokens, the model is made for 256"), (1, "of 1 tokens")] {
            let error = context_length(&config, Some(asked)).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_oldest_questions_are_left_out_first() {
        let template = ChatTemplate::of_model(
            "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}",
            BTreeMap::new(),
            std::path::Path::new("template"),
        );
        let tokenizer = Tokenizer::bytes();
        let said = || {
            let turn = |n: &str| [Message::user(n), Message::assistant(n)];
            let mut messages = vec![Message::system("be brief")];
            messages.extend(["1111", "2222", "3333"].iter().flat_map(|n| turn(n)));
            messages.push(Message::user("last"));
            messages
        };
        let fitted = |most| {
            let mut messages = said();
            fit(&template, &tokenizer, &mut messages, most)
                .map(|tokens| tokenizer.decode(&tokens))
                .map_err(|error| error.to_string())
        };
        assert_eq!(fitted(44).unwrap(), "sbe briefu1111a1111u2222a2222u3333a3333ulast");
        assert_eq!(fitted(43).unwrap(), "sbe briefu2222a2222u3333a3333ulast");
        assert_eq!(fitted(14).unwrap(), "sbe briefulast");
        assert!(fitted(13).unwrap_err().contains("takes 14 tokens, there is room for 13"));
    }
}

//! Text from prompts: the prompt through the model at once, then token by token, each with what the
//! model remembers of those before it. The same function is run first on a device without data, which
//! tells what it takes; then an arena of that size is enough.

use compute::{Device, Kind, Params, Tape};

use super::choice::Choice;
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::host::numbers;
use crate::model::llama::Llama;
use crate::model::llama::base::Base;
use crate::model::llama::cache::Cache;

/// What is to be written.
#[derive(Clone, Debug)]
pub struct Request {
    /// The tokens to go on from.
    pub prompt: Vec<u32>,
    /// The most tokens to add.
    pub max_tokens: usize,
    /// How they are chosen.
    pub choice: Choice,
    /// In which formats the model is held.
    pub precision: Precision,
}

/// Told each new token; answers whether to go on. The token that ends a text is not told.
pub type Take<'a> = &'a mut dyn FnMut(u32) -> bool;

/// A text to be written with a model.
pub struct Job<'a> {
    base: &'a Base,
    request: Request,
}

impl<'a> Job<'a> {
    /// Checks what is asked for against the model.
    pub fn new(base: &'a Base, request: Request) -> Result<Self> {
        let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
        request.choice.check()?;
        if request.prompt.is_empty() || request.max_tokens == 0 {
            let (max, n) = (request.max_tokens, request.prompt.len());
            return wrong(
                format!("{max} tokens after {n}"),
                "give a prompt, and ask for one at least",
            );
        }
        let (all, most) = (request.n_tokens(), base.config.max_position_embeddings);
        if all > most {
            let problem = format!("prompt and text are {all} tokens, the model is made for {most}");
            return wrong(problem, "shorten the prompt, or lower --max-tokens");
        }
        let vocabulary = base.config.vocab_size;
        if let Some(id) = request.prompt.iter().find(|id| **id as usize >= vocabulary) {
            let problem = format!("token {id} of the prompt, the model knows {vocabulary}");
            return wrong(problem, "use the tokenizer that belongs to the model");
        }
        Ok(Self { base, request })
    }

    /// Bytes at the peak, found without reading a number.
    pub fn plan(&self, kind: Kind, limit: usize) -> Result<usize> {
        let device = Device::meta(kind, super::UNLIMITED);
        self.run(&device, &|_| true, &|_| false, &mut |_| true)?;
        let peak = device.usage().extent;
        if peak > limit {
            return Err(super::too_large("writing", peak, limit));
        }
        Ok(peak)
    }

    /// Writes the text on a device that has room for it; says how many tokens it has.
    pub fn run(
        &self,
        device: &Device,
        tick: weights::Tick<'_>,
        is_end: &dyn Fn(u32) -> bool,
        take: Take<'_>,
    ) -> Result<usize> {
        let mut adapters = self.base.own_adapter();
        let model = self.base.load(device, self.request.precision, &mut adapters, tick)?;
        adapters.check_all_used(&self.base.path)?;
        write(device, (&model, &adapters.params), &self.request, is_end, take)
    }
}

impl Request {
    /// Tokens of prompt and text.
    fn n_tokens(&self) -> usize {
        self.prompt.len() + self.max_tokens
    }
}

/// Writes a text with a model that is loaded already; says how many tokens it has.
pub fn write(
    device: &Device,
    (model, params): (&Llama, &Params),
    request: &Request,
    is_end: &dyn Fn(u32) -> bool,
    take: Take<'_>,
) -> Result<usize> {
    let Request { prompt, max_tokens, choice, precision } = request;
    // The last token is given and never seen.
    let most = request.n_tokens() - 1;
    let mut writer = Writer {
        device,
        model,
        params,
        cache: Cache::new(device, model.config(), precision.dtype, most)?,
    };
    let mut logits = writer.logits(prompt)?;
    for n in 0..*max_tokens {
        let token = choice.choose(&logits, n);
        if is_end(token) {
            return Ok(n);
        }
        if !take(token) {
            return Ok(n + 1);
        }
        if n + 1 == *max_tokens {
            break;
        }
        // No token takes more than the last: a rehearsal goes there at once.
        if device.is_meta() {
            writer.cache.skip_to(most - 1);
            writer.logits(&[token])?;
            break;
        }
        logits = writer.logits(&[token])?;
    }
    Ok(*max_tokens)
}

/// A model in the middle of a text.
struct Writer<'a> {
    device: &'a Device,
    model: &'a Llama,
    params: &'a Params,
    cache: Cache,
}

impl Writer<'_> {
    /// What may follow these tokens.
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let n = tokens.len();
        let tape = Tape::inference(self.device, self.params, 0);
        let ids = self.device.upload([1, n], tokens)?;
        let hidden = self.model.extend(&tape, &ids, &mut self.cache)?;
        let last = tape.split_tokens(&hidden, n - 1..n)?;
        drop(hidden);
        Ok(numbers(self.model.logits(&tape, &last)?.tensor()))
    }
}

#[cfg(test)]
mod tests {
    use compute::{Dtype, Quantisation};

    use super::*;
    use crate::model::llama::tests::{golden, ids, recorded};
    use crate::verify::difference;

    const PLAIN: Precision = Precision { dtype: Dtype::F32, base: None };

    fn request(name: &str, max_tokens: usize) -> Request {
        let prompt = ids(name, "in.input_ids")[..24].to_vec();
        Request { prompt, max_tokens, choice: Choice::likeliest(), precision: PLAIN }
    }

    fn written(base: &Base, request: Request, is_end: &dyn Fn(u32) -> bool) -> Vec<u32> {
        let job = Job::new(base, request).unwrap();
        let device = Device::cpu(2, job.plan(Kind::cpu(2), usize::MAX).unwrap()).unwrap();
        let mut text = Vec::new();
        let take = &mut |token| {
            text.push(token);
            true
        };
        let n = job.run(&device, &|_| true, is_end, take).unwrap();
        assert_eq!(n, text.len());
        text
    }

    #[test]
    fn texts_are_those_of_transformers() {
        for name in ["llama3", "qwen2", "qwen3"] {
            let base = Base::open(&golden(name)).unwrap();
            let expected = ids(name, "greedy");
            assert_eq!(written(&base, request(name, 16), &|_| false), expected, "{name}");
            // All that comes before the end.
            let end = expected[5];
            let first = expected.iter().position(|token| *token == end).unwrap();
            assert_eq!(
                written(&base, request(name, 16), &|t| t == end),
                expected[..first],
                "{name}"
            );
        }
    }

    #[test]
    fn tokens_one_by_one_are_as_all_at_once() {
        let device = Device::cpu(2, 64 << 20).unwrap();
        let base = Base::open(&golden("qwen3")).unwrap();
        let mut adapters = base.own_adapter();
        let model = base.load(&device, PLAIN, &mut adapters, &|_| true).unwrap();
        let (params, tokens) = (&adapters.params, ids("qwen3", "in.input_ids"));
        let cache = Cache::new(&device, model.config(), Dtype::F32, 24).unwrap();
        let mut writer = Writer { device: &device, model: &model, params, cache };
        let expected = recorded("qwen3", "out.logits");
        for step in [0..7, 7..8, 8..9, 9..24] {
            let got = writer.logits(&tokens[step.clone()]).unwrap();
            let expected = &expected[(step.end - 1) * got.len()..step.end * got.len()];
            assert!(difference(expected, &got) < 1e-5, "{step:?}");
        }
        assert!(writer.logits(&tokens[..1]).is_err(), "there is no room for a 25th");
    }

    #[test]
    fn a_text_takes_what_was_planned() {
        let base = Base::open(&golden("llama")).unwrap();
        for (dtype, quantisation) in
            [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::F32, Some(Quantisation::Int8))]
        {
            let precision = Precision { dtype, base: quantisation };
            let job = Job::new(&base, Request { precision, ..request("llama", 40) }).unwrap();
            let planned = job.plan(Kind::cpu(2), usize::MAX).unwrap();
            let device = Device::cpu(2, planned).unwrap();
            let n = job.run(&device, &|_| true, &|_| false, &mut |_| true).unwrap();
            assert_eq!((n, device.usage().extent), (40, planned), "{dtype} {quantisation:?}");
            let error = job.plan(Kind::cpu(2), planned - 1).unwrap_err().to_string();
            assert!(error.starts_with("writing does not fit: needs"), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused() {
        let base = Base::open(&golden("llama")).unwrap();
        let fine = request("llama", 4);
        let cases = [
            (Request { prompt: vec![], ..fine.clone() }, "4 tokens after 0"),
            (Request { max_tokens: 0, ..fine.clone() }, "0 tokens after 24"),
            (Request { max_tokens: 233, ..fine.clone() }, "257 tokens, the model is made for 256"),
            (
                Request { prompt: vec![1, 512], ..fine },
                "token 512 of the prompt, the model knows 512",
            ),
        ];
        for (request, says) in cases {
            let error = Job::new(&base, request).err().unwrap().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}

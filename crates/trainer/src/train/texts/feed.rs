//! What a run on texts is fed with: sequences of tokens in an order that follows from the seed.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use compute::Device;

use super::write::Writer;
use super::{Portion, Reading, Tokens};
use crate::config::RunConfig;
use crate::config::text::Text;
use crate::data::Order;
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::model::llama::Llama;
use crate::progress;
use crate::task::lesson::{self, Ahead, Learner, Lesson, Ready};
use crate::task::prefetch::Prefetch;
use crate::text::{Request, Sequence, Texts};

/// Texts as tokens, and how they are shown.
pub(crate) struct Feed<'a> {
    texts: Arc<Texts>,
    order: Order,
    size: Tokens,
    /// What is written along the way.
    writer: Option<Writer<'a>>,
}

impl<'a> Feed<'a> {
    /// Of texts that are all in tokens.
    pub fn new(lesson: Reading<'a>, config: &RunConfig, texts: Texts) -> Result<Self> {
        let size = Tokens(lesson.text.length);
        let shown = vec![(size, 1); texts.n_train()];
        Ok(Self {
            order: Order::new(&shown, config.train.batch, config.train.seed),
            texts: Arc::new(texts),
            size,
            writer: lesson.shows().then(|| Writer::new(lesson)).transpose()?,
        })
    }
}

/// Turns the texts of a job into tokens, or finds them again.
pub fn open_texts(
    lesson: &Reading<'_>,
    config: &RunConfig,
    tell: progress::Tell<'_>,
) -> Result<Texts> {
    let Text { path, length, token_format: width, validation: held_out, .. } = lesson.text;
    let request = Request {
        path: path.clone(),
        width: *width,
        length: *length,
        held_out: held_out.clone(),
        seed: config.train.seed,
        folder: config.cache_folder(),
    };
    Texts::open(&request, lesson.tokenizer, tell)
}

impl<'a> lesson::Feed for Feed<'a> {
    type Lesson = Reading<'a>;
    type Sample = Sequence;

    fn fingerprint(&self) -> Fingerprint {
        self.texts.fingerprint()
    }

    fn n_train(&self) -> usize {
        self.texts.n_train()
    }

    fn n_held_out(&self) -> usize {
        self.texts.n_held_out()
    }

    fn batches_per_epoch(&self) -> u64 {
        self.order.batches_per_epoch()
    }

    fn read_from(&self, number: u64) -> Ahead<Self> {
        let (texts, mut order, size) = (Arc::clone(&self.texts), self.order.clone(), self.size);
        Prefetch::begin(number, move |number| {
            let samples = order.batch(number).into_iter().map(|index| texts.train(index));
            Ok(Ready { number, samples: samples.collect::<Result<_>>()?, size })
        })
    }

    /// As if every token counted.
    fn expected(&mut self, numbers: Range<u64>) -> f64 {
        let n: usize = numbers.map(|number| self.order.batch(number).len()).sum();
        (n * self.size.0) as f64
    }

    fn portion(&self, samples: &[Sequence]) -> Result<(f64, Portion)> {
        Ok(Portion::of(samples))
    }

    fn held_out(&self, index: usize) -> Result<(Tokens, Vec<(f64, Portion)>)> {
        Ok((self.size, vec![Portion::of(&[self.texts.held_out(index)?])]))
    }

    fn show(
        &self,
        device: &Device,
        learner: Learner<'_, Llama>,
        (_, step): (&Path, u64),
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>> {
        match &self.writer {
            Some(writer) => writer.write(device, learner, step, goes_on),
            None => Ok(Vec::new()),
        }
    }
}

//! `[adapter]`: which layers get an adapter, and of what size.

use std::path::Path;

use super::error::ConfigError;
use super::optimizer::OptimizerConfig;
use super::section::{Key, ResolvedKeys, Section, read_table, section};
use super::source::{RawValue, ValueOrigin};
use super::targets::TargetNames;
use super::text_encoders::{EncoderRates, RATE_KEY, clip_targets, refuse_idle_encoders};
use super::train::exclude;
use super::training_data::TrainingData;
use super::value::{ConfigValue, quoted, words};
use crate::model::adapter::factors::LokrShape;
use crate::model::adapter::{AdapterForm, AdapterFormat, AdapterTarget, UNUSED, name_matches};
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::diffusion::text::EncoderAdapter;

/// Which layers get an adapter, and of what size.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Of what kind.
    pub kind: AdapterKind,
    /// By layer; of several that name a layer the first counts. None without an adapter.
    pub targets: Vec<AdapterTarget>,
    /// Layers that get none all the same.
    pub exclude: Vec<String>,
    /// Text encoders that get one too.
    pub text_encoders: Vec<EncoderAdapter>,
    /// Whether norms are trained beside them.
    pub trains_norms: bool,
}

section! {
    /// Which layers get an adapter, and of what size.
    pub(super) RawAdapter => AdapterKeys {
        /// `lora`; `dora`: LoRA with a trained magnitude per output; `loha`: elementwise product of two low-rank matrices; `lokr`: Kronecker product; `full`: full fine-tune of all weights, no adapter
        kind: AdapterKind = Default(AdapterKind::Lora), Any;
        /// LoRA rank (kohya: `network_dim`). With `loha` a layer computes with its square, and 8 if not set
        rank: usize = Default(DEFAULT_RANK), Within(1.0, 4096.0);
        /// LoRA alpha: the update is scaled by alpha / rank (kohya: `network_alpha`). Not set: equal to `rank`
        alpha: Option<f64> = Default(None), UpTo(0.0, 65536.0);
        /// LoRA dropout: share of the layer's input that the adapter does not see in training
        dropout: f64 = Default(0.0), Under(0.0, 1.0);
        /// Rank-stabilised LoRA (rsLoRA): the update is scaled by alpha / √rank instead
        rslora: bool = Default(false), Any;
        /// LoRA+: the learning rate of B is so many times that of A (kohya, PEFT: `loraplus_lr_ratio`)
        loraplus_lr_ratio: f64 = Default(1.0), UpTo(0.0, 1024.0);
        /// LoKr: rows and columns of the outer Kronecker factor (LyCORIS: `factor`). Not set: as even as the layer's sizes allow
        factor: Option<usize> = Default(None), Within(1.0, 4096.0);
        /// LoKr: the inner Kronecker factor is a whole matrix, not of low rank
        full_matrix: bool = Default(false), Any;
        /// LoKr: the outer Kronecker factor is of low rank too
        decompose_both: bool = Default(false), Any;
        /// Also train the weights and biases of norms, not of low rank (LyCORIS: `train_norm`)
        train_norm: bool = Default(false), Any;
        /// Layers with an adapter (PEFT: `target_modules`): ends of names, or whole names with `*`; or a word: `attention`: its projections; `all`: all linear layers of blocks but modulations; `kohya`, `ai-toolkit`: what these train (SD3: not `ai-toolkit`, language models: neither). Shown: for SD3. Language models: `all`; with experts: `attention`
        targets: TargetNames = Default(TargetNames(default_targets())), Any;
        /// Targets without an adapter, named as in `targets`; `unused`: layers that can learn nothing, the default for image models with default targets
        exclude: Option<Vec<String>> = Default(None), Filled;
        /// Layers with their own rank and alpha (PEFT: `rank_pattern`), among the targets or beside them
        pattern: Vec<Pattern> = Default(Vec::new()), Any;
        /// Image models: text encoders with a LoRA beside the model's, which then run in every step (diffusers: `train_text_encoder`; kohya: without `network_train_unet_only`). SD3: `clip-l`, `clip-g`; FLUX.1: `clip-l`
        text_encoders: Vec<String> = Default(Vec::new()), Any;
        /// Layers of text encoders with a LoRA, named as in `targets`
        text_encoder_targets: Vec<String> = Default(clip_targets()), Filled;
        /// Learning rate of text encoders, or a list with one for each of `text_encoders` (diffusers, kohya: `text_encoder_lr`). Not set: `optimizer.learning_rate`
        text_encoder_learning_rate: Option<EncoderRates> = Default(None), UpTo(0.0, 10.0);
    }
}

section! {
    /// Layers with sizes of their own.
    pub RawPattern => Pattern {
        /// Layers, named as in `targets`
        r#match: String = Required, Filled;
        /// LoRA rank. Not set: `adapter.rank`
        rank: Option<usize> = Default(None), Within(1.0, 4096.0);
        /// LoRA alpha. Not set: equal to the rank
        alpha: Option<f64> = Default(None), UpTo(0.0, 65536.0);
        /// Learning rate of these layers. Not set: `optimizer.learning_rate`
        learning_rate: Option<f64> = Default(None), UpTo(0.0, 10.0);
    }
}

/// Kinds of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// Two narrow matrices (Hu et al., arXiv 2106.09685).
    Lora,
    /// The same with the lengths of rows trained apart (Liu et al., arXiv 2402.09353).
    Dora,
    /// The elementwise product of two low-rank matrices (Hyeon-Woo et al., arXiv 2108.06098).
    Loha,
    /// A Kronecker product (Yeh et al., arXiv 2309.14859).
    Lokr,
    /// Full fine-tune: no adapter, all weights of the model are trained.
    Full,
}

words!(AdapterKind {
    "lora" => Self::Lora,
    "dora" => Self::Dora,
    "loha" => Self::Loha,
    "lokr" => Self::Lokr,
    "full" => Self::Full,
});

/// Chosen: what most adapters have.
const DEFAULT_RANK: usize = 16;
/// The same of `LoHa`, which then has as many parameters.
const DEFAULT_LOHA_RANK: usize = 8;

/// Keys that only an adapter has.
const ADAPTER_ONLY_KEYS: [&str; 15] = [
    "adapter.rank",
    "adapter.alpha",
    "adapter.dropout",
    "adapter.rslora",
    "adapter.loraplus_lr_ratio",
    "adapter.factor",
    "adapter.full_matrix",
    "adapter.decompose_both",
    "adapter.train_norm",
    "adapter.targets",
    "adapter.exclude",
    "adapter.pattern",
    "adapter.text_encoders",
    "adapter.text_encoder_targets",
    "adapter.text_encoder_learning_rate",
];

/// How a job without an adapter says so.
pub(super) const FULL_FINE_TUNE: &str = "adapter.kind = \"full\"";

/// Where the base does not tell its family.
fn default_targets() -> Vec<String> {
    DiffusionFamily::fallback().targets()
}

impl AdapterConfig {
    /// Whether a layer gets an adapter.
    pub fn names(&self, layer: &str) -> bool {
        self.targets.iter().any(|target| name_matches(&target.pattern, layer))
            && !self.exclude.iter().any(|pattern| name_matches(pattern, layer))
    }

    /// The one that a job has which says nothing of it but its kind.
    pub(crate) fn default_for(material: &TrainingData, base: &Path) -> Self {
        let targets = material.default_targets(base).unwrap_or_else(default_targets);
        let target = |pattern| AdapterTarget {
            pattern,
            rank: DEFAULT_RANK,
            alpha: DEFAULT_RANK as f32,
            dropout: 0.0,
            form: AdapterForm::Lora,
            rate_factors: [1.0; 2],
        };
        let targets = targets.into_iter().map(target).collect();
        let exclude = material.images().map_or_else(|_| Vec::new(), |_| vec![UNUSED.to_owned()]);
        let text_encoders = Vec::new();
        Self { kind: AdapterKind::Lora, targets, exclude, text_encoders, trains_norms: false }
    }

    /// As meant; patterns come first, so that they count where a target names the layer too.
    pub(super) fn new(
        keys: AdapterKeys,
        material: &TrainingData,
        base: &Path,
        family: Option<&DiffusionFamily>,
        optimizer: &OptimizerConfig,
        rows: &mut ResolvedKeys,
    ) -> Result<Self, ConfigError> {
        let AdapterKeys {
            kind,
            mut rank,
            alpha,
            dropout,
            rslora,
            loraplus_lr_ratio,
            factor,
            full_matrix,
            decompose_both,
            train_norm,
            mut targets,
            mut exclude,
            pattern,
            text_encoders,
            text_encoder_targets,
            text_encoder_learning_rate,
        } = keys;
        if kind == AdapterKind::Full {
            for key in ADAPTER_ONLY_KEYS {
                rows.leave_out(key, FULL_FINE_TUNE)?;
            }
            let (targets, exclude, text_encoders) = (Vec::new(), Vec::new(), Vec::new());
            return Ok(Self { kind, targets, exclude, text_encoders, trains_norms: false });
        }
        refuse_idle(kind, full_matrix, decompose_both, rows)?;
        if kind == AdapterKind::Loha
            && rows.origin("adapter.rank").is_some_and(ValueOrigin::is_default)
        {
            rank = DEFAULT_LOHA_RANK;
            rows.replace("adapter.rank", &rank);
        }
        refuse_idle_encoders(kind, &text_encoders, material, rows)?;
        let own_rates = [
            ("adapter.pattern", pattern.iter().any(|pattern| pattern.learning_rate.is_some())),
            ("adapter.loraplus_lr_ratio", loraplus_lr_ratio != 1.0),
            (RATE_KEY, text_encoder_learning_rate.is_some()),
        ];
        refuse_rates(own_rates, optimizer, rows)?;
        let is_free = rows.origin("adapter.targets").is_some_and(ValueOrigin::is_default);
        if let Some(family) = family {
            let usual = TargetNames(family.targets());
            rows.of_family(family, "adapter.targets", &mut targets, usual);
        }
        if let Some(usual) = material.default_targets(base).filter(|_| is_free) {
            targets = TargetNames(usual);
        }
        let is_free = is_free || targets.is_presets() && !targets.0.is_empty();
        let presets = material.target_presets(family, base);
        let TargetNames(targets) = targets.expand(presets, rows.origin("adapter.targets"))?;
        rows.replace("adapter.targets", &targets);
        if targets.is_empty() && pattern.is_empty() {
            return Err(ConfigError::Missing { key: "adapter.targets".into() });
        }
        // Who types layers is told of those that learn nothing.
        if is_free && exclude.is_none() && material.images().is_ok() {
            exclude = Some(vec![UNUSED.to_owned()]);
            rows.replace("adapter.exclude", &exclude);
        }
        rows.replace("adapter.alpha", &Some(alpha.unwrap_or(rank as f64)));
        let lokr =
            LokrShape { factor, is_full_matrix: full_matrix, decomposes_both: decompose_both };
        let usual = UsualTarget {
            rank,
            alpha,
            dropout,
            form: form(kind, lokr),
            is_stabilised: rslora,
            rates: [optimizer.learning_rate, loraplus_lr_ratio],
        };
        let own: Vec<_> = pattern.into_iter().map(|own| usual.of_pattern(own)).collect();
        let others = targets.into_iter().map(|name| usual.of_layer(name, None));
        let targets = own.into_iter().chain(others).collect();
        let n_encoders = text_encoders.len();
        let rates = text_encoder_learning_rate.map(|rates| rates.of_each(n_encoders, rows));
        let rates = rates.transpose()?;
        let text_encoders =
            usual.of_encoders(text_encoders, &text_encoder_targets, rates.as_deref());
        let exclude = exclude.unwrap_or_default();
        Ok(Self { kind, targets, exclude, text_encoders, trains_norms: train_norm })
    }
}

fn form(kind: AdapterKind, lokr: LokrShape) -> AdapterForm {
    match kind {
        AdapterKind::Dora => AdapterForm::Dora,
        AdapterKind::Loha => AdapterForm::Loha,
        AdapterKind::Lokr => AdapterForm::Lokr(lokr),
        AdapterKind::Lora | AdapterKind::Full => AdapterForm::Lora,
    }
}

/// What targets have that say nothing of their own.
struct UsualTarget {
    rank: usize,
    alpha: Option<f64>,
    dropout: f64,
    form: AdapterForm,
    /// rsLoRA.
    is_stabilised: bool,
    /// The learning rate, and what it is multiplied by for B.
    rates: [f64; 2],
}

impl UsualTarget {
    fn of_layer(&self, pattern: String, learning_rate: Option<f64>) -> AdapterTarget {
        let Self { rank, dropout, form, rates: [usual, of_b], .. } = *self;
        // Files have no other place for it that all programs read.
        let stabilised = if self.is_stabilised { (rank as f64).sqrt() } else { 1.0 };
        AdapterTarget {
            pattern,
            rank,
            alpha: (self.alpha.unwrap_or(rank as f64) * stabilised) as f32,
            dropout: dropout as f32,
            form,
            rate_factors: [learning_rate.map_or(1.0, |own| own / usual) as f32, of_b as f32],
        }
    }

    /// Of text encoders, each with these layers, and with its learning rate if there are some.
    fn of_encoders(
        &self,
        names: Vec<String>,
        layers: &[String],
        rates: Option<&[f64]>,
    ) -> Vec<EncoderAdapter> {
        let of_encoder = |(index, name)| {
            let rate = rates.map(|rates| rates[index]);
            let targets = layers.iter().map(|layer| self.of_layer(layer.clone(), rate));
            EncoderAdapter { name, targets: targets.collect() }
        };
        names.into_iter().enumerate().map(of_encoder).collect()
    }

    fn of_pattern(&self, own: Pattern) -> AdapterTarget {
        // An alpha chosen for another rank would change how much the adapter counts.
        let alpha = own.alpha.or(if own.rank.is_none() { self.alpha } else { None });
        let sized = Self { rank: own.rank.unwrap_or(self.rank), alpha, ..*self };
        sized.of_layer(own.r#match, own.learning_rate)
    }
}

/// A key of another kind of adapter would be ignored, so it is refused.
fn refuse_idle(
    kind: AdapterKind,
    is_full_matrix: bool,
    decomposes_both: bool,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    let with = format!("adapter.kind = {}", rows.value("adapter.kind"));
    if kind != AdapterKind::Lokr {
        for key in ["adapter.factor", "adapter.full_matrix", "adapter.decompose_both"] {
            rows.leave_out(key, &with)?;
        }
    }
    if matches!(kind, AdapterKind::Loha | AdapterKind::Lokr) {
        // LyCORIS and PEFT have neither.
        for key in ["adapter.dropout", "adapter.loraplus_lr_ratio"] {
            rows.leave_out(key, &with)?;
        }
    }
    if is_full_matrix && decomposes_both {
        rows.leave_out("adapter.decompose_both", "adapter.full_matrix = true")?;
    }
    if is_full_matrix {
        // Without a rank there is nothing to scale by.
        for key in ["adapter.rank", "adapter.alpha", "adapter.rslora"] {
            rows.leave_out(key, "adapter.full_matrix = true")?;
        }
    }
    Ok(())
}

/// Learning rates of some parameters need an optimizer that takes each of them by itself. By key: whether there is one.
fn refuse_rates(
    own_rates: [(&'static str, bool); 3],
    optimizer: &OptimizerConfig,
    rows: &ResolvedKeys,
) -> Result<(), ConfigError> {
    let Some((key, _)) = own_rates.into_iter().find(|(_, has_own)| *has_own) else {
        return Ok(());
    };
    if optimizer.kind.updates_one_by_one() {
        return Ok(());
    }
    exclude(key, "optimizer.kind", quoted("adamw"), rows)
}

/// Formats that are written if none is given.
pub(super) fn default_formats(adapter: &AdapterConfig) -> Vec<AdapterFormat> {
    match adapter.kind {
        _ if adapter.trains_norms => vec![AdapterFormat::Comfyui],
        AdapterKind::Loha | AdapterKind::Lokr => vec![AdapterFormat::Peft],
        AdapterKind::Lora | AdapterKind::Dora | AdapterKind::Full => vec![AdapterFormat::Diffusers],
    }
}

impl ConfigValue for Vec<Pattern> {
    fn accepted() -> String {
        "a list of tables".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let parts = typed.parts().ok_or_else(|| typed.refuse(Self::accepted()))?;
        let pattern = |part: RawValue<'_>| {
            let mut raw = RawPattern::default();
            let keys = RawPattern::keys();
            let known: Vec<_> = keys.iter().map(|key| (part.key.as_str(), key.name)).collect();
            read_table(&mut raw, &part.key, &part, &known)?;
            raw.decide(&part.key, &mut ResolvedKeys::default())
        };
        parts.map(pattern).collect()
    }

    /// On one line, since each key has one origin.
    fn write(&self) -> Option<String> {
        let table = |Pattern { r#match, rank, alpha, learning_rate }: &Pattern| {
            let pairs = [
                ("match", r#match.write()),
                ("rank", rank.write()),
                ("alpha", alpha.write()),
                ("learning_rate", learning_rate.write()),
            ];
            let set =
                pairs.into_iter().filter_map(|(key, value)| Some(format!("{key} = {}", value?)));
            format!("{{ {} }}", set.collect::<Vec<_>>().join(", "))
        };
        Some(format!("[{}]", self.iter().map(table).collect::<Vec<_>>().join(", ")))
    }

    fn keys() -> Vec<Key> {
        RawPattern::keys()
    }
}

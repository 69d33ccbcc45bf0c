//! Qwen2.5-VL's vision tower (transformers' `Qwen2_5_VisionTransformerPretrainedModel`; Bai et al., "Qwen2.5-VL Technical
//! Report", arXiv 2502.13923): patches of an image to tokens of the language model. Blocks attend within windows, a few of
//! them to the whole image; a merger makes one token of a square of patches.
//!
//! Shapes: P patches, D width.

use compute::ops::{
    Activation, Attention, Linear, QkNormRope, Rope, RopeAxis, RopePairs, rope_table,
};
use compute::{Device, Dtype, Result as Computed, Tape, Tensor, Var};
use serde::Deserialize;
use weights::Catalog;

use super::processor::{PatchGrid, patch_order};
use super::windows::WindowOrder;
use crate::error::Result;
use crate::model::build::{ModelBuilder, TensorSpec, tensor_specs};
use crate::model::config::Unsupported;
use crate::model::files::CheckpointLayout;
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::tensor_piece::TensorPiece;

/// `vision_config` of `config.json`. Defaults are those of transformers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// D.
    pub hidden_size: usize,
    /// Inner width of a feed-forward.
    pub intermediate_size: usize,
    /// Heads.
    pub num_heads: usize,
    /// Channels of an image.
    #[serde(alias = "in_chans")]
    pub in_channels: usize,
    /// Pixels along the side of a patch.
    pub patch_size: usize,
    /// Patches along the side of a square that becomes a token.
    pub spatial_merge_size: usize,
    /// Frames of a patch.
    pub temporal_patch_size: usize,
    /// Pixels along the side of a window.
    pub window_size: usize,
    /// Width of the language model.
    pub out_hidden_size: usize,
    /// Blocks that attend to the whole image.
    pub fullatt_block_indexes: Vec<usize>,
    /// Activation of feed-forwards.
    pub hidden_act: String,
    /// Rotary positions.
    pub rope_parameters: VisionRopeJson,
}

/// The rotary settings of a vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct VisionRopeJson {
    /// Base of the frequencies.
    pub rope_theta: f64,
}

impl Default for VisionRopeJson {
    fn default() -> Self {
        Self { rope_theta: 10_000.0 }
    }
}

impl Default for VisionConfig {
    fn default() -> Self {
        Self { hidden_size: 3584, ..Self::published() }
    }
}

/// Chosen: more than any tower has, and few enough that no count of elements overflows.
const MOST_WIDTH: usize = 1 << 14;
const MOST_PATCH: usize = 1 << 8;

/// Epsilon of norms. Taken: transformers has it in the code.
const EPSILON: f32 = 1e-6;

impl VisionConfig {
    /// That of Qwen2.5-VL-7B.
    pub fn published() -> Self {
        Self {
            depth: 32,
            hidden_size: 1280,
            intermediate_size: 3420,
            num_heads: 16,
            in_channels: 3,
            patch_size: 14,
            spatial_merge_size: 2,
            temporal_patch_size: 2,
            window_size: 112,
            out_hidden_size: 3584,
            fullatt_block_indexes: vec![7, 15, 23, 31],
            hidden_act: "silu".into(),
            rope_parameters: VisionRopeJson::default(),
        }
    }

    /// Checks that all of it is supported, beside a language model of this width.
    pub fn check(&self, width: usize) -> std::result::Result<(), Unsupported> {
        let Self { hidden_size, num_heads, out_hidden_size, hidden_act, window_size, .. } = self;
        self.check_sizes()?;
        let is_even = *num_heads > 0 && hidden_size.is_multiple_of(4 * num_heads);
        let heads = format!(
            "hidden_size {hidden_size} of the vision tower is not a multiple of 4 for each of {num_heads} heads"
        );
        Unsupported::unless(is_even, heads)?;
        let channels =
            format!("in_channels of the vision tower is {}, expected 3", self.in_channels);
        Unsupported::unless(self.in_channels == 3, channels)?;
        let activation = format!("hidden_act of the vision tower is {hidden_act}, expected silu");
        Unsupported::unless(hidden_act == "silu", activation)?;
        let problem = format!("window_size {window_size} is less than a merged patch");
        Unsupported::unless(self.window() > 0, problem)?;
        let theta = self.rope_parameters.rope_theta;
        let problem = format!("rope_theta of the vision tower is {theta}");
        Unsupported::unless(theta.is_finite() && theta > 0.0, problem)?;
        let problem = format!(
            "out_hidden_size of the vision tower is {out_hidden_size}, the language model's {width}"
        );
        Unsupported::unless(*out_hidden_size == width, problem)
    }

    /// Checks that sizes are such that numbers of elements can be computed.
    fn check_sizes(&self) -> std::result::Result<(), Unsupported> {
        for (key, size, most) in [
            ("depth", self.depth, MOST_WIDTH),
            ("hidden_size", self.hidden_size, MOST_WIDTH),
            ("intermediate_size", self.intermediate_size, MOST_WIDTH),
            ("num_heads", self.num_heads, MOST_WIDTH),
            ("out_hidden_size", self.out_hidden_size, MOST_WIDTH),
            ("patch_size", self.patch_size, MOST_PATCH),
            ("spatial_merge_size", self.spatial_merge_size, MOST_PATCH),
            ("temporal_patch_size", self.temporal_patch_size, MOST_PATCH),
        ] {
            let problem = format!("{key} of the vision tower is {size}, expected 1 to {most}");
            Unsupported::unless((1..=most).contains(&size), problem)?;
        }
        Ok(())
    }

    /// Merged patches along the side of a window.
    fn window(&self) -> usize {
        self.window_size / self.spatial_merge_size.max(1) / self.patch_size.max(1)
    }

    fn values_per_patch(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Patches of a token.
    fn patches_per_token(&self) -> usize {
        self.spatial_merge_size * self.spatial_merge_size
    }

    /// The order in which the patches of an image are seen.
    pub fn order(&self, grid: PatchGrid) -> WindowOrder {
        let n = self.patches_per_token();
        WindowOrder::new(grid.merged(self.spatial_merge_size), self.window(), n)
    }
}

/// What all blocks see of an image beside its hidden states.
pub struct VisionInputs {
    order: WindowOrder,
    /// The rotary table of its patches.
    rope_table: Tensor,
}

impl VisionInputs {
    /// Of an image.
    pub fn new(config: &VisionConfig, device: &Device, grid: PatchGrid) -> Result<Self> {
        let order = config.order(grid);
        let places: Vec<_> = patch_order(grid, config.spatial_merge_size).collect();
        let places = order.apply(&places, config.patches_per_token());
        let positions: Vec<f32> = places.as_flattened().iter().map(|at| *at as f32).collect();
        let d_head = config.hidden_size / config.num_heads;
        let axis = RopeAxis::new(d_head / 2, config.rope_parameters.rope_theta);
        let axes = [axis.clone(), axis];
        let table = device.upload_with([grid.len(), d_head], || rope_table(&axes, &positions))?;
        Ok(Self { order, rope_table: table })
    }

    /// The order of its patches.
    pub fn order(&self) -> &WindowOrder {
        &self.order
    }
}

/// What comes before the blocks.
pub struct PatchEmbedding {
    /// [D, channels · frames · patch · patch]
    weight: Var,
    /// Dtype of hidden states. Those in f16 would overflow.
    dtype: Dtype,
}

impl PatchEmbedding {
    /// Builds it.
    pub fn new(config: &VisionConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let (patch, d) = (config.patch_size, config.hidden_size);
        let sizes = [d, config.in_channels, config.temporal_patch_size, patch, patch];
        let weight = build.array("visual.patch_embed.proj.weight", sizes)?;
        let dtype = if build.dtype() == Dtype::F16 { Dtype::F32 } else { build.dtype() };
        Ok(Self { weight: weight.reshape([d, config.values_per_patch()]), dtype })
    }

    /// The values of patches, one after the other: [1, P, D].
    pub fn forward(&self, tape: &Tape<'_>, values: &[f32]) -> Result<Var> {
        let width = self.weight.shape().width();
        let sizes = [1, values.len() / width, width];
        let patches = tape.device().upload_as(sizes, values, self.dtype)?;
        Ok(tape.linear(&patches.into(), Linear::new(&self.weight))?)
    }
}

/// A block: attention and a feed-forward, each with a residual connection.
pub struct VisionBlock {
    norms: [NormTensor; 2],
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
    gate: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
    n_heads: usize,
    d_head: usize,
    /// Whether it attends to the whole image.
    is_full: bool,
}

impl VisionBlock {
    /// Builds a block.
    pub fn new(config: &VisionConfig, build: &mut ModelBuilder<'_>, index: usize) -> Result<Self> {
        let mut b = build.at(format!("visual.blocks.{index}"));
        let (d, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            norms: [b.norm("norm1", d)?, b.norm("norm2", d)?],
            q: b.linear("attn.q", d, d)?,
            k: b.linear("attn.k", d, d)?,
            v: b.linear("attn.v", d, d)?,
            out: b.linear("attn.proj", d, d)?,
            gate: b.linear("mlp.gate_proj", d, inner)?,
            up: b.linear("mlp.up_proj", d, inner)?,
            down: b.linear("mlp.down_proj", inner, d)?,
            n_heads: config.num_heads,
            d_head: d / config.num_heads,
            is_full: config.fullatt_block_indexes.contains(&index),
        })
    }

    /// x [1, P, D] to the same.
    pub fn forward(&self, tape: &Tape<'_>, x: &Var, inputs: &VisionInputs) -> Computed<Var> {
        let h = tape.rms_norm(x, Some(&self.norms[0].var(tape)?), EPSILON)?;
        let rotated = |x: &Var| {
            let rope = Some(Rope { table: &inputs.rope_table, pairs: RopePairs::HalfSplit });
            tape.qk_norm_rope(x, QkNormRope { n_heads: self.n_heads, norm: None, rope })
        };
        let q = rotated(&self.q.forward(tape, &h)?)?;
        let k = rotated(&self.k.forward(tape, &h)?)?;
        let v = self.v.forward(tape, &h)?;
        drop(h);
        let attended = self.attend(tape, [&q, &k, &v], inputs)?;
        drop((q, k, v));
        let x = self.out.forward_add(tape, &attended, x)?;
        drop(attended);
        let h = tape.rms_norm(&x, Some(&self.norms[1].var(tape)?), EPSILON)?;
        let (gate, up) = (self.gate.forward(tape, &h)?, self.up.forward(tape, &h)?);
        drop(h);
        let inner = tape.glu(&gate, &up, Activation::Silu)?;
        drop((gate, up));
        self.down.forward_add(tape, &inner, &x)
    }

    /// Attention to the whole image, or within windows.
    fn attend(&self, tape: &Tape<'_>, qkv: [&Var; 3], inputs: &VisionInputs) -> Computed<Var> {
        let how = Attention::full(self.n_heads, self.d_head);
        if self.is_full {
            let [q, k, v] = qkv;
            return tape.attention(q, k, v, how);
        }
        let width = self.n_heads * self.d_head;
        let mut attended = Vec::with_capacity(inputs.order.batches.len());
        for batch in &inputs.order.batches {
            let n = batch.tokens.len();
            let windows = |x: &Var| -> Computed<Var> {
                let tokens = tape.split_tokens(x, batch.tokens.clone())?;
                Ok(tokens.reshape([batch.n_windows, n / batch.n_windows, width]))
            };
            let [q, k, v] = qkv.map(windows);
            attended.push(tape.attention(&q?, &k?, &v?, how)?.reshape([1, n, width]));
        }
        match &attended[..] {
            [all] => Ok(all.clone()),
            parts => tape.concat_tokens(&parts.iter().collect::<Vec<_>>()),
        }
    }
}

/// What comes after the blocks: a token of the language model for each square of patches.
pub struct PatchMerger {
    norm: NormTensor,
    layers: [LinearLayer; 2],
    patches_per_token: usize,
}

impl PatchMerger {
    /// Builds it.
    pub fn new(config: &VisionConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let mut b = build.at("visual.merger");
        let inner = config.hidden_size * config.patches_per_token();
        Ok(Self {
            norm: b.norm("ln_q", config.hidden_size)?,
            layers: [
                b.linear("mlp.0", inner, inner)?,
                b.linear("mlp.2", inner, config.out_hidden_size)?,
            ],
            patches_per_token: config.patches_per_token(),
        })
    }

    /// x [1, P, D] to tokens of the language model, in the order of the patches.
    pub fn forward(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        let h = tape.rms_norm(x, Some(&self.norm.var(tape)?), EPSILON)?;
        let (n, width) = (h.shape().sizes()[1], h.shape().width());
        let h = h.reshape([1, n / self.patches_per_token, width * self.patches_per_token]);
        let [first, second] = &self.layers;
        let h = first.forward_activated(tape, &h, Activation::GeluErf)?;
        second.forward(tape, &h)
    }
}

/// The tower, whole.
pub struct VisionTower {
    patches: PatchEmbedding,
    blocks: Vec<VisionBlock>,
    merger: PatchMerger,
}

impl VisionTower {
    /// Builds the model.
    pub fn new(config: &VisionConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        Ok(Self {
            patches: PatchEmbedding::new(config, build)?,
            blocks: (0..config.depth)
                .map(|index| VisionBlock::new(config, build, index))
                .collect::<Result<_>>()?,
            merger: PatchMerger::new(config, build)?,
        })
    }

    /// The values of an image's patches to tokens of the language model, both in the inputs' order.
    pub fn forward(&self, tape: &Tape<'_>, values: &[f32], inputs: &VisionInputs) -> Result<Var> {
        let mut x = self.patches.forward(tape, values)?;
        for block in &self.blocks {
            x = block.forward(tape, &x, inputs)?;
        }
        Ok(self.merger.forward(tape, &x)?)
    }
}

/// Our names begin with this.
const OURS: &str = "visual.";
const PATCHES: &str = "patch_embed.proj.weight";

/// What the names of a tower begin with in a file, if it has one: `visual.`, in files of newer transformers
/// `model.visual.`.
fn prefix(catalog: &Catalog) -> Option<&str> {
    let mut names = catalog.tensors.iter().map(|tensor| tensor.name.as_str());
    names.find_map(|name| name.strip_suffix(PATCHES).filter(|prefix| prefix.ends_with(OURS)))
}

/// Whether a file has a vision tower.
pub fn has_tower(catalog: &Catalog) -> bool {
    prefix(catalog).is_some()
}

/// Queries, keys and values are one matrix in files; all other names are the language model's.
pub fn layout(catalog: &Catalog) -> CheckpointLayout<'_> {
    let prefix = prefix(catalog).unwrap_or(OURS);
    let place = move |name: &str| {
        let inner = name.strip_prefix(OURS).unwrap_or(name);
        for (third, ours) in [".attn.q.", ".attn.k.", ".attn.v."].into_iter().enumerate() {
            if inner.contains(ours) {
                let stored = inner.replacen(ours, ".attn.qkv.", 1);
                return vec![TensorPiece::part(format!("{prefix}{stored}"), third, 3)];
            }
        }
        vec![TensorPiece::whole(format!("{prefix}{inner}"))]
    };
    let is_spare = move |name: &str| !name.starts_with(prefix) || name.ends_with("inv_freq");
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(is_spare) }
}

/// The tensors of a published file.
pub fn stored_tensors(config: &VisionConfig) -> Result<Vec<TensorSpec>> {
    let specs = tensor_specs(|build| VisionTower::new(config, build))?;
    let stored = |mut spec: TensorSpec| {
        if spec.name.contains(".attn.k.") || spec.name.contains(".attn.v.") {
            return None;
        }
        if spec.name.contains(".attn.q.") {
            spec.name = spec.name.replacen(".attn.q.", ".attn.qkv.", 1);
            let mut sizes = spec.shape.sizes().to_vec();
            sizes[0] *= 3;
            spec.shape = compute::Shape::new(&sizes);
        }
        Some(spec)
    };
    Ok(specs.into_iter().filter_map(stored).collect())
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell: the width of heads, windows, and
/// which blocks attend to the whole image.
pub fn infer(catalog: &Catalog, like: &VisionConfig) -> Option<VisionConfig> {
    let prefix = prefix(catalog)?;
    let shape = |name: &str| -> Option<Vec<usize>> {
        let tensor = catalog.find(&format!("{prefix}{name}")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect())
    };
    let &[hidden_size, in_channels, temporal_patch_size, patch_size, _] = &shape(PATCHES)?[..]
    else {
        return None;
    };
    let merged = *shape("merger.mlp.0.weight")?.first()?;
    let is_there = |index: &usize| shape(&format!("blocks.{index}.norm1.weight")).is_some();
    let d_head = like.hidden_size / like.num_heads.max(1);
    Some(VisionConfig {
        depth: (0..catalog.tensors.len()).take_while(is_there).count(),
        hidden_size,
        intermediate_size: *shape("blocks.0.mlp.gate_proj.weight")?.first()?,
        num_heads: hidden_size / d_head.max(1),
        in_channels,
        patch_size,
        spatial_merge_size: (merged / hidden_size.max(1)).isqrt(),
        temporal_patch_size,
        out_hidden_size: *shape("merger.mlp.2.weight")?.first()?,
        ..like.clone()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weights::FileDtype;

    use super::*;
    use crate::model::files::WeightFiles;

    /// Counted by transformers.
    #[test]
    fn the_published_tower_has_its_number_of_parameters() {
        let config = VisionConfig::published();
        let specs = tensor_specs(|build| VisionTower::new(&config, build)).unwrap();
        let count: usize = specs.iter().map(|spec| spec.shape.elements()).sum();
        assert_eq!(count, 676_550_144);
        let stored = stored_tensors(&config).unwrap();
        assert_eq!(stored.iter().map(|spec| spec.shape.elements()).sum::<usize>(), count);
    }

    #[test]
    fn towers_are_found_by_both_names() {
        let other = VisionConfig {
            depth: 3,
            hidden_size: 160,
            intermediate_size: 44,
            num_heads: 2,
            patch_size: 6,
            spatial_merge_size: 3,
            temporal_patch_size: 1,
            out_hidden_size: 52,
            ..VisionConfig::published()
        };
        for config in [VisionConfig::published(), other] {
            for prefix in ["visual.", "model.visual."] {
                let sizes =
                    |spec: &TensorSpec| spec.shape.sizes().iter().map(|n| *n as u64).collect();
                let name = |spec: &TensorSpec| spec.name.replacen(OURS, prefix, 1);
                let stored = stored_tensors(&config).unwrap();
                let all = stored.iter().map(|spec| (name(spec), sizes(spec)));
                let all = all.chain([("model.norm.weight".to_owned(), vec![3])]);
                let catalog = Catalog::meta(Path::new("file"), FileDtype::Bf16, all);
                assert!(has_tower(&catalog));
                assert_eq!(infer(&catalog, &VisionConfig::published()), Some(config.clone()));
                let build = |build: &mut ModelBuilder<'_>| VisionTower::new(&config, build);
                WeightFiles::find(&catalog, &layout(&catalog), build).unwrap();
            }
        }
        assert!(!has_tower(&Catalog::default()));
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let refused = |change: fn(&mut VisionConfig)| {
            let mut config = VisionConfig::published();
            change(&mut config);
            config.check(3584).unwrap_err().0
        };
        assert!(VisionConfig::published().check(3584).is_ok());
        for (change, problem) in [
            (
                (|c| c.out_hidden_size = 2048) as fn(&mut VisionConfig),
                "out_hidden_size of the vision tower is 2048, the language model's 3584",
            ),
            (
                |c| c.num_heads = 7,
                "hidden_size 1280 of the vision tower is not a multiple of 4 for each of 7 heads",
            ),
            (|c| c.window_size = 27, "window_size 27 is less than a merged patch"),
            (|c| c.patch_size = 0, "patch_size of the vision tower is 0, expected 1 to 256"),
            (|c| c.num_heads = 0, "num_heads of the vision tower is 0, expected 1 to 16384"),
            (|c| c.in_channels = 4, "in_channels of the vision tower is 4, expected 3"),
        ] {
            assert_eq!(refused(change), problem);
        }
    }
}

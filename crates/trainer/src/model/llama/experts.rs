//! A mixture of experts in place of a feed-forward (Jiang et al., "Mixtral of Experts", arXiv 2401.04088; Qwen Team,
//! "Qwen3 Technical Report", arXiv 2505.09388): a router sends each token to a few of many feed-forwards, whose outputs
//! are summed up by its weights. As transformers' `MixtralForCausalLM` and `Qwen3MoeForCausalLM` compute it.
//!
//! No token is dropped. Rows, one for each token and expert it goes to, are sorted by expert; memory is the same however
//! they are shared out.

use compute::ops::{Activation, Linear, Routing, SharedAxis};
use compute::{Dtype, Tape, Var};

use super::{LanguageFamily, LlamaConfig};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::layer::{GroupedLayers, ModelTensor};

/// What a config says of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// How many there are in a layer.
    pub num_experts: usize,
    /// How many of them see a token.
    pub num_experts_per_tok: usize,
    /// Inner width of one.
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Layers with a plain feed-forward instead.
    pub dense_layers: Vec<usize>,
}

impl ExpertsConfig {
    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        let Self { num_experts: n, num_experts_per_tok: k, intermediate_size, .. } = self;
        Unsupported::unless(
            (1..=*n).contains(k),
            format!("num_experts_per_tok is {k}, of {n} experts"),
        )?;
        Unsupported::unless(*intermediate_size > 0, "moe_intermediate_size is 0".to_owned())
    }
}

/// Names of a family's tensors: the module of a layer, and the three layers of an expert.
struct ExpertNames {
    module: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

const QWEN: ExpertNames =
    ExpertNames { module: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj" };
const MIXTRAL: ExpertNames =
    ExpertNames { module: "block_sparse_moe", gate: "w1", up: "w3", down: "w2" };

/// The experts of a layer with their router.
pub struct Experts {
    /// [experts, D]
    router: ModelTensor,
    gate: GroupedLayers,
    up: GroupedLayers,
    down: GroupedLayers,
    n_chosen: usize,
    is_normalised: bool,
}

impl Experts {
    /// Builds them.
    pub fn new(
        config: &LlamaConfig,
        experts: &ExpertsConfig,
        b: &mut ModelBuilder<'_>,
    ) -> Result<Self> {
        let names = if config.family == LanguageFamily::Mixtral { MIXTRAL } else { QWEN };
        let (d, inner, n) = (config.hidden_size, experts.intermediate_size, experts.num_experts);
        let mut b = b.at(names.module);
        let router = b.embedding("gate", [n, d])?;
        let mut layers = [Vec::new(), Vec::new(), Vec::new()];
        for index in 0..n {
            let mut b = b.at(format!("experts.{index}"));
            layers[0].push(b.linear_no_bias(names.gate, d, inner)?);
            layers[1].push(b.linear_no_bias(names.up, d, inner)?);
            layers[2].push(b.linear_no_bias(names.down, inner, d)?);
        }
        let [gate, up, down] = layers.map(GroupedLayers::new);
        Ok(Self {
            router,
            gate: gate?,
            up: up?,
            down: down?,
            n_chosen: experts.num_experts_per_tok,
            is_normalised: experts.norm_topk_prob,
        })
    }

    /// x [S, N, D] to the same.
    pub fn forward(&self, tape: &Tape<'_>, x: &Var) -> compute::Result<Var> {
        let (tokens, d) = (x.shape().rows(), x.shape().width());
        let of_tokens = x.reshape([1, tokens, d]);
        let logits = tape.linear(&of_tokens, Linear::new(&self.router.var(tape)))?;
        let Routing { tokens: ids, weights, groups } =
            tape.route(&logits, self.n_chosen, self.is_normalised)?;
        drop(logits);
        let rows = tape.gather_tokens(&of_tokens, &ids)?.reshape([groups.n_rows(), d]);
        let gate = self.gate.forward(tape, &rows, &groups)?;
        let up = self.up.forward(tape, &rows, &groups)?;
        drop(rows);
        let inner = tape.glu(&gate, &up, Activation::Silu)?;
        drop((gate, up));
        let y = self.down.forward(tape, &inner, &groups)?;
        drop(inner);
        // Weighted in f32, as the router's softmax is computed.
        let y = tape.convert(&y, Dtype::F32)?;
        let y = tape.khatri_rao(&weights, &y, SharedAxis::Rows)?;
        let y = y.reshape([1, groups.n_rows(), d]);
        let sum = tape.scatter_tokens(&y, &ids, tokens)?;
        Ok(tape.convert(&sum, x.dtype())?.reshape(x.shape()))
    }
}

//! Group norm on a GPU.

use super::GroupNormConfig;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "group_norm", text: include_str!("kernel.cu") };

/// Threads of a block that sums up a part of a group.
const THREADS: u32 = 1024;
/// Elements of a part at least, and parts of a group at most; tests cut small groups too. Chosen: the few groups of a
/// large image keep all of a large GPU busy, and a small one is not cut.
const PART_ELEMENTS: usize = if cfg!(test) { 16 } else { 1 << 15 };
const MAX_PARTS: usize = 64;
/// Elements of a part are a multiple of this, so that each begins where several are read at a time.
const PART_MULTIPLE: usize = 8;
/// Rows of blocks that a GPU can have.
const MAX_BLOCK_ROWS: usize = 65535;

/// How groups are cut.
struct GroupParts {
    /// Of all samples.
    groups: usize,
    /// Elements of a group.
    size: usize,
    /// Parts of a group.
    n_parts: usize,
    /// Elements of a part.
    part_size: usize,
}

impl GroupParts {
    fn new(x: &Tensor, form: GroupNormConfig) -> Self {
        let groups = x.shape().sizes()[0] * form.n_groups;
        let size = x.shape().elements() / groups.max(1);
        let n_parts = (size / PART_ELEMENTS).clamp(1, MAX_PARTS);
        let part_size = size.div_ceil(n_parts).next_multiple_of(PART_MULTIPLE);
        Self { groups, size, n_parts, part_size }
    }

    /// Floats of the sums, two of 8 bytes for each part.
    fn sum_floats(&self) -> usize {
        4 * self.groups * self.n_parts
    }
}

/// Floats of workspace: sums of each part, then two statistics of each group.
pub fn floats(x: &Tensor, form: GroupNormConfig) -> usize {
    let parts = GroupParts::new(x, form);
    parts.sum_floats() + 2 * parts.groups
}

pub fn forward(
    cuda: &CudaBackend,
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    form: GroupNormConfig,
    workspace: &mut Tensor,
    y: &mut Tensor,
) {
    let &[samples, channels, height, width] = x.shape().sizes() else {
        unreachable!("checked by the op")
    };
    let (planes, plane) = (samples * channels, height * width);
    if planes * plane == 0 {
        return;
    }
    let statistics = statistics(cuda, x, form, workspace);
    let p = pack(plane, &[x, y]);
    let across = LaunchConfig::per_element(plane / p);
    let down = planes.min(MAX_BLOCK_ROWS) as u32;
    let grid = LaunchConfig { blocks: [across.blocks[0], down, 1], ..across };
    let group_channels = channels / form.n_groups;
    let arguments = arguments![
        x,
        statistics,
        weight,
        bias,
        y,
        planes,
        channels,
        group_channels,
        plane,
        form.activation.code()
    ];
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    cuda.launch(&KERNELS, "group_norm", variant, grid, &arguments);
}

/// Finds the mean and 1 / std of each group; returns where they lie.
fn statistics(
    cuda: &CudaBackend,
    x: &Tensor,
    form: GroupNormConfig,
    workspace: &mut Tensor,
) -> u64 {
    let parts = GroupParts::new(x, form);
    let GroupParts { groups, size, n_parts, part_size } = parts;
    let sums = workspace.address_mut();
    let statistics = sums + (parts.sum_floats() * size_of::<f32>()) as u64;
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(pack(size, &[x]));
    let grid = LaunchConfig { threads: THREADS, ..LaunchConfig::blocks(groups * n_parts) };
    let arguments = arguments![x, sums, size, n_parts, part_size];
    cuda.launch(&KERNELS, "group_sums", variant, grid, &arguments);
    let arguments = arguments![x, sums, statistics, groups, size, n_parts, form.epsilon];
    cuda.launch(&KERNELS, "group_statistics", variant, LaunchConfig::per_row(groups), &arguments);
    statistics
}

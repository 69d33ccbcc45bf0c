//! Images as tokens and back on a GPU.

use super::PatchLayout;
use crate::Tensor;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig};

const KERNELS: CudaSource = CudaSource { name: "patchify", text: include_str!("kernel.cu") };

pub fn patchify(cuda: &CudaBackend, layout: PatchLayout, image: &Tensor, tokens: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), CudaVariant::of(&[image.dtype()]));
    launch(cuda, layout, [image.into(), tokens.into()], variant, n, false);
}

pub fn unpatchify(cuda: &CudaBackend, layout: PatchLayout, tokens: &Tensor, image: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), CudaVariant::of(&[image.dtype()]));
    launch(cuda, layout, [image.into(), tokens.into()], variant, n, true);
}

fn launch(
    cuda: &CudaBackend,
    layout: PatchLayout,
    [image, tokens]: [CudaArg; 2],
    variant: CudaVariant,
    n: usize,
    back: bool,
) {
    let PatchLayout { channels, height, width, patch, strides: steps, .. } = layout;
    let sizes = [n, channels, height, width, patch, steps[0], steps[1], steps[2]];
    let mut arguments = vec![image, tokens];
    arguments.extend(sizes.map(CudaArg::from));
    arguments.push(back.into());
    cuda.launch(&KERNELS, "patchify", variant, LaunchConfig::per_element(n), &arguments);
}

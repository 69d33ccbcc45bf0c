//! Images as tokens and back on a card.

use super::Layout;
use crate::Tensor;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant};

const KERNELS: Source = Source { name: "patchify", text: include_str!("kernel.cu") };

pub fn patchify(cuda: &Cuda, layout: Layout, image: &Tensor, tokens: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), Variant::of(&[image.dtype()]));
    launch(cuda, layout, [image.into(), tokens.into()], variant, n, false);
}

pub fn unpatchify(cuda: &Cuda, layout: Layout, tokens: &Tensor, image: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), Variant::of(&[image.dtype()]));
    launch(cuda, layout, [image.into(), tokens.into()], variant, n, true);
}

fn launch(
    cuda: &Cuda,
    layout: Layout,
    [image, tokens]: [Argument; 2],
    variant: Variant,
    n: usize,
    back: bool,
) {
    let Layout { channels, height, width, patch, steps, .. } = layout;
    let sizes = [n, channels, height, width, patch, steps[0], steps[1], steps[2]];
    let mut arguments = vec![image, tokens];
    arguments.extend(sizes.map(Argument::from));
    arguments.push(back.into());
    cuda.launch(&KERNELS, "patchify", variant, Grid::numbers(n), &arguments);
}

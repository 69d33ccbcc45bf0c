//! The sums of a step's gradients between the NVIDIA GPUs of all ranks by NCCL, where they lie: no copy goes through main
//! memory. MPI says which gradients arrived anywhere.

#![allow(unsafe_code)]

use cluster::World;
use cluster::nccl::{GpuRanks, GpuStream, GpuValues, Nccl};
use compute::{CudaStream, Device, Gradients, ParamKey, Params};

use crate::error::Result;

/// The GPUs of all ranks.
pub struct GpuSums<'a> {
    world: &'a World,
    ranks: GpuRanks,
}

impl<'a> GpuSums<'a> {
    /// Joins the GPUs of all ranks, if every rank wants that and has one of its own; says by what, or why not.
    pub fn join(
        world: &'a World,
        device: &Device,
        is_wanted: bool,
    ) -> Result<(Option<Self>, Option<String>)> {
        let stream = device.cuda_stream().filter(|_| is_wanted);
        let gpu = stream.as_ref().map(CudaStream::gpu).transpose()?;
        let nccl = gpu.and_then(|_| Nccl::open());
        let can_join = world.have_own_gpus(gpu, nccl.as_ref())?;
        let (Some(nccl), Some(stream)) = (nccl.filter(|_| can_join), stream) else {
            return Ok((None, None));
        };
        stream.bind()?;
        let version = nccl.version()?;
        Ok(match world.join_gpus(nccl) {
            Ok(ranks) => {
                let said = format!("gradients are summed between GPUs by {version}");
                (Some(Self { world, ranks }), Some(said))
            }
            Err(error) => {
                let said = format!("{version} cannot sum gradients, MPI does: {error}");
                (None, Some(said))
            }
        })
    }

    /// Replaces gradients by their sums over all ranks. One that did not arrive here counts as zeros if it arrived anywhere.
    pub fn sum(&self, device: &Device, params: &Params, gradients: &mut Gradients) -> Result<()> {
        let keys: Vec<ParamKey> = params.keys().collect();
        let is_here = keys.iter().map(|key| i64::from(gradients.get(*key).is_some()));
        let n_arrived = self.world.sum(is_here.collect())?;
        let mut all = Vec::new();
        for (key, _) in keys.into_iter().zip(n_arrived).filter(|(_, n)| *n > 0) {
            let n = params.get(key).shape().elements();
            if gradients.get(key).is_none() {
                gradients.write(key, &vec![0.0; n])?;
            }
            let address = gradients.cuda_address(key).expect("it has arrived, or was just written");
            all.push(GpuValues { address, n });
        }
        let stream = device.cuda_stream().expect("it has joined with others");
        let gpu = GpuStream { stream: stream.bind()? };
        // SAFETY: the gradients lie on that GPU, and stay until the stream was waited for below; its context was just bound.
        unsafe { self.ranks.sum(&all, gpu)? };
        self.ranks.wait_until(stream.reached()?)?;
        Ok(device.synchronise()?)
    }
}

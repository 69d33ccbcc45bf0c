//! placeholder until rates are merged
use compute::Work;
/// Rates.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Whether they were measured on the machine they are for.
    pub is_measured: bool,
}
impl Rates {
    /// Seconds.
    pub fn seconds(&self, work: &Work) -> f64 {
        work.flops as f64 / 1e11 + work.bytes as f64 / 1e10
    }
}

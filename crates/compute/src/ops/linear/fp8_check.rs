//! How precise a layer is in fp8: a few rows of its input, multiplied in fp8 and in the input's dtype. Both read the
//! same fp8 weights, so that what is measured is the rounding of activations, and of sums.

use std::cell::RefCell;

use crate::op::OpContext;
use crate::ops::matmul::{FusedMatmul, Matmul, Operand};
use crate::quantised::fp8_rows::is_multiplied;
use crate::{Quantised, Result, Tensor};

/// How far a layer's result in fp8 is from that in the dtype of its input.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Check {
    /// Its name.
    pub layer: String,
    /// The size of the difference, relative to that of the result.
    pub error: f64,
    /// Whether it is multiplied in fp8 still.
    pub is_in_fp8: bool,
}

/// Checks of the layers that a tape asks.
pub(crate) struct Fp8Checks {
    most: f64,
    all: RefCell<Vec<Fp8Check>>,
}

/// Rows that are looked at in one place. Chosen: what they are multiplied by takes longest to read, and each place has
/// a prompt's or an image's tokens.
const ROWS: usize = 8;

impl Fp8Checks {
    pub fn new(most: f64) -> Self {
        Self { most, all: RefCell::default() }
    }

    pub fn into_all(self) -> Vec<Fp8Check> {
        self.all.into_inner()
    }

    pub fn look(&self, cx: OpContext<'_>, x: &Tensor, weight: &Quantised) -> Result<()> {
        let Some(layer) = weight.fp8_layer() else { return Ok(()) };
        if !is_multiplied(weight, x.dtype()) {
            return Ok(());
        }
        let error = error(cx, x, weight)?;
        // NaN is not within it.
        let is_in_fp8 = error <= self.most;
        if !is_in_fp8 {
            weight.stop_fp8();
        }
        self.all.borrow_mut().push(Fp8Check { layer: layer.into(), error, is_in_fp8 });
        Ok(())
    }
}

/// Of rows at the beginning, in the middle and at the end.
fn error(cx: OpContext<'_>, x: &Tensor, weight: &Quantised) -> Result<f64> {
    let (rows, outputs) = (x.shape().rows(), weight.shape().rows());
    let x = x.reshape([rows, x.shape().width()]);
    let count = rows.min(ROWS);
    let [mut off, mut all] = [0.0; 2];
    for first in [0, (rows - count) / 2, rows - count] {
        let part = x.narrow(first..first + count);
        let multiply = |right: Operand<'_>| {
            let mut y = cx.workspace([count, outputs], x.dtype())?;
            FusedMatmul::new(&[Matmul::new(&part, right.t())], &mut y).run(cx)?;
            cx.device.synchronise()?;
            Ok(if cx.has_data() { y.to_f32_vec() } else { Vec::new() })
        };
        let right = Operand::quantised(weight, x.dtype());
        let (ours, exact) = (multiply(right)?, multiply(right.without_fp8())?);
        let differences = ours.iter().zip(&exact).map(|(ours, exact)| f64::from(ours - exact));
        off += differences.map(|x| x * x).sum::<f64>();
        all += exact.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    }
    Ok(if all == 0.0 { 0.0 } else { (off / all).sqrt() })
}

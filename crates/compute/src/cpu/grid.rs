//! Matrices of any real format as the product sees them: blocks of f32, in place where they are
//! f32 already, widened into a little room where they are not.

use half::{bf16, f16};

use super::gemm::View;
use super::rows::load;
use crate::dtype::Real;
use crate::{Dtype, Tensor};

/// Real numbers of any format, to be read.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> From<&'a Tensor> for Floats<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        match tensor.dtype() {
            Dtype::F32 => Self::F32(tensor.data()),
            Dtype::Bf16 => Self::Bf16(tensor.data()),
            Dtype::F16 => Self::F16(tensor.data()),
            other => unreachable!("an op let {other} through as a real format"),
        }
    }
}

/// A matrix within a tensor, by its steps between rows and between columns, one of which is 1.
#[derive(Clone, Copy)]
pub(crate) struct Grid<'a> {
    pub data: Floats<'a>,
    /// Where the first number lies.
    pub start: usize,
    pub row_step: usize,
    pub column_step: usize,
}

impl<'a> Grid<'a> {
    pub fn is_f32(self) -> bool {
        matches!(self.data, Floats::F32(_))
    }

    /// Rows and columns exchanged.
    pub fn t(self) -> Self {
        Self { row_step: self.column_step, column_step: self.row_step, ..self }
    }

    /// `rows` × `columns` numbers from (`row`, `column`) on. `room` must hold that many, unless the
    /// format is f32.
    pub fn block<'b>(
        self,
        (row, rows): (usize, usize),
        (column, columns): (usize, usize),
        room: &'b mut [f32],
    ) -> View<'b>
    where
        'a: 'b,
    {
        let start = self.start + row * self.row_step + column * self.column_step;
        match self.data {
            // Of nothing there may not even be a start.
            _ if rows * columns == 0 => View { data: &[], row_step: 0, column_step: 0 },
            Floats::F32(data) => {
                let (row_step, column_step) = (self.row_step, self.column_step);
                View { data: &data[start..], row_step, column_step }
            }
            Floats::Bf16(data) => self.widen(&data[start..], rows, columns, room),
            Floats::F16(data) => self.widen(&data[start..], rows, columns, room),
        }
    }

    /// Along whichever direction is contiguous; the view says which it was.
    fn widen<'b, T: Real>(
        self,
        data: &[T],
        rows: usize,
        columns: usize,
        room: &'b mut [f32],
    ) -> View<'b> {
        let (step, lines, length) = match self.column_step {
            1 => (self.row_step, rows, columns),
            step => (step, columns, rows),
        };
        let room = &mut room[..rows * columns];
        for (line, to) in room.chunks_exact_mut(length).enumerate().take(lines) {
            load(&data[line * step..][..length], to);
        }
        let view = View::rows(room, length);
        if self.column_step == 1 { view } else { view.t() }
    }
}

//! The innermost loops of AMX: one square of 32 x 32 sums in four tiles, two tiles of each operand beside
//! them.
#![allow(unsafe_code)]

use std::arch::asm;

use super::PANEL;

/// Addresses of the four tiles of sums.
pub(super) struct SumTiles {
    pub top: *mut f32,
    pub bottom: *mut f32,
    pub row_bytes: usize,
    /// Whether to add to what is there.
    pub add: bool,
}

impl SumTiles {
    /// # Safety
    /// The square must be there.
    pub unsafe fn without_depth(self) {
        for row in 0..if self.add { 0 } else { 16 } {
            for half in [self.top, self.bottom] {
                // SAFETY: a row of the square.
                unsafe { half.wrapping_byte_add(row * self.row_bytes).write_bytes(0, PANEL) };
            }
        }
    }
}

/// Loads the upper or lower tile of a split of the left operand.
macro_rules! left {
    (upper $part:literal) => {
        concat!("tileloadd tmm4, [{a} + {line} + 2048 * ", $part, "]\n")
    };
    (lower $part:literal) => {
        concat!("tileloadd tmm5, [{a} + {line} + 2048 * ", $part, " + 1024]\n")
    };
}

/// Loads the first or second tile of a split of the right operand.
macro_rules! right {
    (first $part:literal) => {
        concat!("tileloadd tmm6, [{b} + {line} + 2048 * ", $part, "]\n")
    };
    (second $part:literal) => {
        concat!("tileloadd tmm7, [{b} + {line} + 2048 * ", $part, " + 1024]\n")
    };
}

/// Multiplies a tile of the left operand by one of the right.
macro_rules! multiply {
    (upper first) => {
        "tdpbf16ps tmm0, tmm4, tmm6\n"
    };
    (upper second) => {
        "tdpbf16ps tmm1, tmm4, tmm7\n"
    };
    (lower first) => {
        "tdpbf16ps tmm2, tmm5, tmm6\n"
    };
    (lower second) => {
        "tdpbf16ps tmm3, tmm5, tmm7\n"
    };
}

/// Multiplies what is loaded, and loads the splits for the next multiplication as soon as a tile is free.
macro_rules! matmul {
    (then left $part:literal) => {
        concat!(
            multiply!(upper first),
            multiply!(upper second),
            left!(upper $part),
            multiply!(lower first),
            multiply!(lower second),
            left!(lower $part),
        )
    };
    (then right $part:literal) => {
        concat!(
            multiply!(upper first),
            multiply!(lower first),
            right!(first $part),
            multiply!(upper second),
            multiply!(lower second),
            right!(second $part),
        )
    };
    (then left $left:literal, right $right:literal) => {
        concat!(
            multiply!(upper first),
            multiply!(upper second),
            left!(upper $left),
            multiply!(lower first),
            right!(first $right),
            multiply!(lower second),
            left!(lower $left),
            right!(second $right),
        )
    };
    () => {
        concat!(
            multiply!(upper first),
            multiply!(upper second),
            multiply!(lower first),
            multiply!(lower second),
        )
    };
}

/// Defines the loop over the depth for operands of so many splits. Small terms come first, so that they are
/// not lost beside large ones. `first` and `next` are the splits of the first multiplication, in the current
/// step and in the next one; `matmuls` are all but the last.
macro_rules! kernel {
    ($name:ident: parts $left_parts:literal, $right_parts:literal;
     first $left:literal, $right:literal; next $next_left:literal, $next_right:literal;
     matmuls $($matmul:expr),*) => {
        /// # Safety
        /// The panels must hold as many steps, at least one; AMX must be set up.
        pub(super) unsafe fn $name(a: *const f32, b: *const f32, steps: usize, sums: SumTiles) {
            // SAFETY: reads the panels and the sums, writes the sums; no one else uses the tiles.
            unsafe {
                asm!(
                    "test {add:e}, {add:e}",
                    "jz 2f",
                    "tileloadd tmm0, [{top} + {row}]",
                    "tileloadd tmm1, [{top} + {row} + 64]",
                    "tileloadd tmm2, [{bottom} + {row}]",
                    "tileloadd tmm3, [{bottom} + {row} + 64]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "3:",
                    left!(upper $left),
                    right!(first $right),
                    left!(lower $left),
                    right!(second $right),
                    "dec {steps}",
                    "jz 5f",
                    "4:",
                    concat!($($matmul,)* matmul!(then left $next_left, right $next_right)),
                    concat!("add {a}, 2048 * ", $left_parts),
                    concat!("add {b}, 2048 * ", $right_parts),
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    concat!($($matmul,)* matmul!()),
                    "tilestored [{top} + {row}], tmm0",
                    "tilestored [{top} + {row} + 64], tmm1",
                    "tilestored [{bottom} + {row}], tmm2",
                    "tilestored [{bottom} + {row} + 64], tmm3",
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    steps = inout(reg) steps => _,
                    line = in(reg) 64usize,
                    top = in(reg) sums.top,
                    bottom = in(reg) sums.bottom,
                    row = in(reg) sums.row_bytes,
                    add = in(reg) u32::from(sums.add),
                    options(nostack),
                );
            }
        }
    };
}

kernel!(one_by_one: parts 1, 1; first 0, 0; next 1, 1; matmuls);
kernel!(three_by_one: parts 3, 1; first 2, 0; next 5, 1;
    matmuls matmul!(then left 1), matmul!(then left 0));
kernel!(one_by_three: parts 1, 3; first 0, 2; next 1, 5;
    matmuls matmul!(then right 1), matmul!(then right 0));
kernel!(three_by_three: parts 3, 3; first 0, 2; next 3, 5;
    matmuls matmul!(then right 1), matmul!(then left 1), matmul!(then right 0),
    matmul!(then left 2), matmul!(then left 0));

//! A slice that several threads write to at once, each its own numbers.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// Exclusively borrowed numbers, handed out piece by piece.
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    length: usize,
    borrow: PhantomData<&'a [T]>,
}

// SAFETY: the numbers are borrowed exclusively for 'a, and `T` may go to other threads; that pieces
// do not overlap is the promise of whoever takes them.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<T> Clone for SharedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub fn new(numbers: &'a mut [T]) -> Self {
        Self { start: numbers.as_mut_ptr(), length: numbers.len(), borrow: PhantomData }
    }

    /// Some of the numbers.
    ///
    /// # Safety
    /// While the slice lives, nobody else may take or touch any of them.
    pub unsafe fn slice(self, from: usize, count: usize) -> &'a mut [T] {
        // SAFETY: inside the borrowed slice (checked by `pointer`); exclusive by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(from, count), count) }
    }

    /// Where some of the numbers start, for code that writes to a block of a matrix.
    pub fn pointer(self, from: usize, count: usize) -> *mut T {
        assert!(from + count <= self.length);
        self.start.wrapping_add(from)
    }
}

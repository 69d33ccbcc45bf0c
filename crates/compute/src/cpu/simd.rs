//! Functions compiled several times, for wider and wider vectors, and chosen when they are called.
//!
//! `simd!` goes around a function over slices that the compiler can turn into vectors. Rows are long
//! enough that the choice costs nothing beside them. Wrapping whole closures instead (as pulp's
//! `dispatch` does) looks tidier, but a closure of any size is then called from three places, is
//! not inlined into any, and runs with the narrowest vectors after all.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Vectors, vectors};

/// What there is to choose from. Arm CPUs have their 128-bit vectors always.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::sync::atomic::{AtomicU8, Ordering};

    /// The widest vectors of this CPU.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub(crate) enum Vectors {
        /// What every CPU of the architecture has.
        Plain = 1,
        /// AVX2 with fused multiply-add, 256 bits.
        V3,
        /// AVX-512, 512 bits.
        V4,
    }

    /// Which vectors to use; asked once, then remembered.
    #[inline(always)]
    pub(crate) fn vectors() -> Vectors {
        static FOUND: AtomicU8 = AtomicU8::new(0);
        match FOUND.load(Ordering::Relaxed) {
            1 => Vectors::Plain,
            2 => Vectors::V3,
            3 => Vectors::V4,
            _ => {
                let found = find();
                FOUND.store(found as u8, Ordering::Relaxed);
                found
            }
        }
    }

    fn find() -> Vectors {
        macro_rules! all {
            ($($feature:tt),*) => { $(is_x86_feature_detected!($feature))&&* };
        }
        let v3 = all!("avx2", "fma", "bmi1", "bmi2", "f16c", "lzcnt", "movbe", "popcnt");
        let v4 = v3 && all!("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl");
        match (v3, v4) {
            (_, true) => Vectors::V4,
            (true, false) => Vectors::V3,
            (false, false) => Vectors::Plain,
        }
    }
}

/// Defines a function that is compiled for each kind of vectors.
macro_rules! simd {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $(<$T:ident: $bound:path>)? ($($arg:ident: $type:ty),* $(,)?)
            $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$meta])*
        #[allow(unsafe_code)] // The calls below; see there.
        $vis fn $name $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,bmi1,bmi2,f16c,lzcnt,movbe,popcnt")]
                fn v3 $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,bmi1,bmi2,f16c,lzcnt,movbe,popcnt")]
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
                fn v4 $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? {
                    body($($arg),*)
                }
                match $crate::cpu::simd::vectors() {
                    // SAFETY: the CPU has these vectors; that is what `vectors` looks for.
                    $crate::cpu::simd::Vectors::V4 => return unsafe { v4($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::simd::Vectors::V3 => return unsafe { v3($($arg),*) },
                    $crate::cpu::simd::Vectors::Plain => {}
                }
            }
            body($($arg),*)
        }
    )*};
}
pub(crate) use simd;

//! Matmuls by cuBLASLt. Our matrices are row-major, the library's column-major: so it is asked for the
//! transposed result, with the operands exchanged, of the same memory.
//!
//! An algorithm is chosen once per kind of matmul: the fastest of the first few that the library's
//! heuristics give, measured on the spot. Where bits must be the same from run to run it is the first,
//! since what is fastest is not.
//!
//! Constants and signatures are taken from `cublasLt.h` of CUDA 13; none of them changed since 11.4.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::size_of_val;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::driver::CudaContext;
use super::library::{functions, names, open};
use crate::{ComputeError, Dtype, Result};

functions! {
    /// What is used of `libcublasLt`.
    Functions {
        cublasLtCreate(*mut *mut c_void);
        cublasLtDestroy(*mut c_void);
        cublasLtMatmulDescCreate(*mut *mut c_void, c_int, c_int);
        cublasLtMatmulDescSetAttribute(*mut c_void, c_int, *const c_void, usize);
        cublasLtMatrixLayoutCreate(*mut *mut c_void, c_int, u64, u64, u64);
        cublasLtMatmulPreferenceCreate(*mut *mut c_void);
        cublasLtMatmulPreferenceSetAttribute(*mut c_void, c_int, *const c_void, usize);
        cublasLtMatmulPreferenceDestroy(*mut c_void);
        cublasLtMatmulAlgoGetHeuristic(
            *mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void,
            *mut c_void, c_int, *mut Heuristic, *mut c_int,
        );
        cublasLtMatmul(
            *mut c_void, *mut c_void, *const f32, u64, *mut c_void, u64, *mut c_void, *const f32,
            u64, *mut c_void, u64, *mut c_void, *const [u64; 8], u64, usize, *mut c_void,
        );
    }
}

/// Bytes of workspace of every matmul. Chosen: a part of every step's peak; the 32 MiB that the library
/// takes by itself made no matmul of the benchmark job faster.
pub(crate) const WORKSPACE: usize = 4 << 20;

const COMPUTE_32F: c_int = 68;
const COMPUTE_32F_FAST_TF32: c_int = 77;
const R_32F: c_int = 0;
const TRANSPOSE_A: c_int = 3;
const TRANSPOSE_B: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
const AUX_POINTER: c_int = 11;
const AUX_LD: c_int = 12;
/// Of A; that of B follows.
const SCALE_POINTER: c_int = 17;
const FAST_ACCUMULATION: c_int = 25;
/// Of A; that of B follows.
const SCALE_MODE: c_int = 31;
/// A scale for each row of the result, by those of A, or for each column, by those of B.
const SCALE_PER_ROW: c_int = 3;
const MAX_WORKSPACE: c_int = 1;
/// Of A; those of B, C and D follow.
const MIN_ALIGNMENT: c_int = 5;

/// An address that is aligned as little as a matrix in fp8, or its result, ever is.
const PLACE: u64 = 16;

/// Algorithms that are measured. Taken: on an H200 the best of eight was 3 to 10 % ahead of the first. Chosen:
/// twice as many, since each kind of matmul is tried once.
const N_CANDIDATES: u8 = 16;
/// Times that each is run to be measured, after one that is not. Chosen: a matmul takes a tenth of a
/// millisecond, and there are some dozen kinds of them in a model.
const N_RUNS: usize = 4;
/// Another algorithm is taken if it needs at most this share of the first one's time. Chosen: what one
/// measurement differs from the next by.
const WORTH: f32 = 0.98;
/// The smallest value above zero: scales a trial matmul that must not change what it is added to.
const NEXT_TO_NOTHING: f32 = f32::from_bits(1);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// out = scale·left·right + add·onto for row-major matrices, left [rows, inner] and right
/// [inner, columns] or, transposed, the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gemm {
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    pub is_transposed: [bool; 2],
    /// Elements from a stored row of each to the next.
    pub strides: [usize; 2],
    /// Of both operands; U8 for fp8 (e4m3). Then sums are less exact than f32: by less than what rounding to fp8
    /// cost, and a tenth faster.
    pub factors: Dtype,
    /// Whether rows of the left operand and columns of the right one have scales; see [`Blas::feasible`].
    pub has_scales: bool,
    pub out: Dtype,
    /// Whether f32 factors may be rounded to the 11 bits of TF32, for the tensor cores.
    pub allows_tf32: bool,
    pub add: bool,
    pub epilogue: Epilogue,
    /// Whether its algorithm may be measured: not where every step has other sizes.
    pub is_measured: bool,
}

/// What is done to the sums before they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    Nothing,
    /// A bias per column, of the result's dtype.
    Bias,
    /// Gelu by tanh after the bias, if there is one; what it is applied to is stored too if wanted.
    Gelu {
        has_bias: bool,
        is_kept: bool,
    },
    /// The derivative of gelu by tanh at what was stored so.
    GeluGrad,
}

impl Epilogue {
    /// Whether what the activation is applied to has a place.
    fn is_kept(self) -> bool {
        matches!(self, Self::Gelu { is_kept: true, .. } | Self::GeluGrad)
    }

    /// `cublasLtEpilogue_t`.
    fn code(self) -> c_int {
        match self {
            Self::Nothing => 1,
            Self::Bias => 4,
            Self::Gelu { has_bias, is_kept } => {
                32 | if has_bias { 4 } else { 0 } | if is_kept { 128 } else { 0 }
            }
            Self::GeluGrad => 64 | 128,
        }
    }
}

/// Where the matrices lie, and what they are multiplied by.
#[derive(Clone, Copy, Default)]
pub(crate) struct GemmOperands {
    pub left: u64,
    pub right: u64,
    /// What the matmul is added to, if it is; often `out` itself.
    pub onto: u64,
    pub out: u64,
    pub scale: f32,
    /// Those of the rows of the left operand, and of the columns of the right one, if they have some.
    pub scales: [u64; 2],
    /// 0 if there is none.
    pub bias: u64,
    /// Takes, or has, what the activation is applied to; 0 if nobody asks.
    pub pre_activation: u64,
    /// [`WORKSPACE`] bytes.
    pub workspace: u64,
    /// Whether this is a trial, and what lies at `out` is of no use yet.
    pub is_trial: bool,
}

impl GemmOperands {
    /// Powers of two that divide the addresses of right, left, and onto and out, at most 256.
    fn alignments(&self) -> [u32; 3] {
        [self.right, self.left, self.onto | self.out].map(|at| 1 << at.trailing_zeros().min(8))
    }
}

pub(super) struct Blas {
    functions: Functions,
    handle: *mut c_void,
    plans: Mutex<HashMap<Gemm, Vec<AlignedPlan>>>,
    /// Whether algorithms are measured.
    is_measured: bool,
    /// Matmuls in fp8 by what was wanted; see [`Blas::feasible`].
    feasible: Mutex<HashMap<Gemm, Gemm>>,
    /// Whether it is taken for a library without scales of rows.
    scales_nothing: AtomicBool,
}

/// A plan, and the alignments of right, left and out that it is for.
type AlignedPlan = ([u32; 3], GemmPlan);

/// A kind of matmul as the library is asked for it.
#[derive(Clone, Copy)]
struct AskedMatmul {
    description: *mut c_void,
    /// Of right, left and out.
    layouts: [*mut c_void; 3],
}

/// The same with the algorithm that was chosen.
#[derive(Clone, Copy)]
struct GemmPlan {
    description: *mut c_void,
    /// Of right, left and out.
    layouts: [*mut c_void; 3],
    algorithm: [u64; 8],
}

// SAFETY: the handle may be used from any thread; descriptions are changed and used under a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Blas {
    pub fn open(is_measured: bool) -> Result<Self> {
        let functions = Functions::find(open(&names("cublasLt", &["13", "12"]))?)?;
        let mut handle = null_mut();
        // SAFETY: writes one handle, in the context that is current.
        check("cublasLtCreate", unsafe { (functions.cublasLtCreate)(&raw mut handle) })?;
        let (plans, feasible) = (Mutex::default(), Mutex::default());
        Ok(Self {
            functions,
            handle,
            plans,
            feasible,
            is_measured,
            scales_nothing: AtomicBool::new(false),
        })
    }

    /// A matmul in fp8 as near to the one that is wanted as the library can do it: with scales of rows and the
    /// epilogue, with scales alone, or without both. By its documentation there are scales on Hopper alone, and since
    /// CUDA 12.9; epilogues have gaps that are not documented. So it is asked.
    pub fn feasible(&self, wanted: &Gemm) -> Gemm {
        let mut known = self.feasible.lock().expect("nothing panics while a matmul is asked for");
        *known.entry(*wanted).or_insert_with(|| {
            let bare = Gemm { epilogue: Epilogue::Nothing, ..*wanted };
            let ways = [*wanted, bare];
            let scales = !self.scales_nothing.load(Ordering::Relaxed);
            let found = ways.into_iter().find(|gemm| scales && self.has_algorithm(gemm));
            found.unwrap_or(Gemm { has_scales: false, ..bare })
        })
    }

    /// Whether the library has an algorithm, for matrices that lie as any may.
    fn has_algorithm(&self, gemm: &Gemm) -> bool {
        // It wants to see that there are places, and does not read there.
        let [onto, out, bias, pre_activation] = [PLACE; 4];
        let scales = [PLACE; 2];
        let plain =
            GemmOperands { left: PLACE, right: PLACE, scale: 1.0, ..GemmOperands::default() };
        let at = GemmOperands { onto, out, scales, bias, pre_activation, ..plain };
        self.describe(gemm, at).and_then(|asked| self.algorithms(gemm, at, asked)).is_ok()
    }

    /// From now on as on GPUs whose library takes no scales of rows.
    #[cfg(test)]
    pub fn scale_nothing(&self) {
        self.scales_nothing.store(true, Ordering::Relaxed);
    }

    fn measures(&self, gemm: &Gemm) -> bool {
        self.is_measured && gemm.is_measured
    }

    /// Whether algorithms for such a matmul are still to be tried.
    pub fn wants_trial(&self, gemm: &Gemm) -> bool {
        let plans = self.plans.lock().expect("nothing panics while a matmul is planned");
        self.measures(gemm) && !can_be_repeated(gemm) && !plans.contains_key(gemm)
    }

    pub fn multiply(&self, driver: &CudaContext, gemm: &Gemm, at: GemmOperands) -> Result<()> {
        let mut plans = self.plans.lock().expect("nothing panics while a matmul is planned");
        let (known, alignments) = (plans.entry(*gemm).or_default(), at.alignments());
        let plan = if let Some((_, plan)) = known.iter().find(|(known, _)| *known == alignments) {
            *plan
        } else {
            let plan = self.plan(driver, gemm, at)?;
            known.push((alignments, plan));
            plan
        };
        self.set_pointers(plan.description, gemm, at)?;
        self.launch(driver, &plan, gemm.add, at)
    }

    fn launch(
        &self,
        driver: &CudaContext,
        plan: &GemmPlan,
        add: bool,
        at: GemmOperands,
    ) -> Result<()> {
        let beta = if add { 1.0f32 } else { 0.0 };
        let [right, left, out] = plan.layouts;
        // SAFETY: the descriptions were made for matrices of these sizes, which lie at these
        // addresses, by the caller; scales lie on the host and are read before this returns.
        let status = unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                plan.description,
                &raw const at.scale,
                at.right,
                right,
                at.left,
                left,
                &raw const beta,
                at.onto,
                out,
                at.out,
                out,
                &raw const plan.algorithm,
                at.workspace,
                WORKSPACE,
                driver.stream(),
            )
        };
        check("cublasLtMatmul", status)
    }

    /// Describes a matmul and chooses an algorithm.
    fn plan(&self, driver: &CudaContext, gemm: &Gemm, at: GemmOperands) -> Result<GemmPlan> {
        let asked = self.describe(gemm, at)?;
        let mut found = self.algorithms(gemm, at, asked)?.into_iter();
        let AskedMatmul { description, layouts } = asked;
        let plan = |algorithm| GemmPlan { description, layouts, algorithm };
        let mut best = plan(found.next().expect("there is one, or it is an error"));
        let is_measured = self.measures(gemm) && (can_be_repeated(gemm) || at.is_trial);
        if !is_measured || found.len() == 0 {
            return Ok(best);
        }
        let mut least = WORTH * self.measure(driver, &best, gemm, at)?;
        for other in found.map(plan) {
            // One that is refused after all is not the fastest.
            let Ok(time) = self.measure(driver, &other, gemm, at) else { continue };
            if time < least {
                (best, least) = (other, time);
            }
        }
        Ok(best)
    }

    fn describe(&self, gemm: &Gemm, at: GemmOperands) -> Result<AskedMatmul> {
        let Gemm { rows, columns, inner, is_transposed: [left_t, right_t], .. } = *gemm;
        let compute = if gemm.allows_tf32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F };
        let mut description = null_mut();
        // SAFETY: writes one handle.
        let status = unsafe {
            (self.functions.cublasLtMatmulDescCreate)(&raw mut description, compute, R_32F)
        };
        check("cublasLtMatmulDescCreate", status)?;
        self.set(description, TRANSPOSE_A, &c_int::from(right_t))?;
        self.set(description, TRANSPOSE_B, &c_int::from(left_t))?;
        self.set(description, EPILOGUE, &gemm.epilogue.code())?;
        if gemm.factors == Dtype::U8 {
            self.set(description, FAST_ACCUMULATION, &1i8)?;
        }
        if gemm.has_scales {
            self.set(description, SCALE_MODE, &SCALE_PER_ROW)?;
            self.set(description, SCALE_MODE + 1, &SCALE_PER_ROW)?;
        }
        self.set_pointers(description, gemm, at)?;
        if gemm.epilogue.is_kept() {
            self.set(description, AUX_LD, &(columns as u64))?;
        }
        // Column by column, a matrix of [rows, width] is one of [width, rows].
        let stored = |rows, width, is_t: bool| if is_t { [rows, width] } else { [width, rows] };
        let [left, right] = gemm.strides;
        let layouts = [
            self.layout(gemm.factors, stored(inner, columns, right_t), right)?,
            self.layout(gemm.factors, stored(rows, inner, left_t), left)?,
            self.layout(gemm.out, [columns, rows], columns)?,
        ];
        Ok(AskedMatmul { description, layouts })
    }

    /// Milliseconds of some runs, in place of the matmul itself; see [`can_be_repeated`].
    fn measure(
        &self,
        driver: &CudaContext,
        plan: &GemmPlan,
        gemm: &Gemm,
        at: GemmOperands,
    ) -> Result<f32> {
        let is_in_place = gemm.add && at.onto == at.out;
        let scale = if is_in_place && !at.is_trial { NEXT_TO_NOTHING } else { at.scale };
        let run = || self.launch(driver, plan, gemm.add, GemmOperands { scale, ..at });
        run()?;
        driver.time(|| (0..N_RUNS).try_for_each(|_| run()))
    }

    /// Tells a description where scales, bias and what is kept lie.
    fn set_pointers(&self, description: *mut c_void, gemm: &Gemm, at: GemmOperands) -> Result<()> {
        let Gemm { epilogue, has_scales, .. } = *gemm;
        if has_scales {
            let [left, right] = at.scales;
            self.set(description, SCALE_POINTER, &right)?;
            self.set(description, SCALE_POINTER + 1, &left)?;
        }
        if matches!(epilogue, Epilogue::Bias | Epilogue::Gelu { has_bias: true, .. }) {
            self.set(description, BIAS_POINTER, &at.bias)?;
        }
        if epilogue.is_kept() {
            self.set(description, AUX_POINTER, &at.pre_activation)?;
        }
        Ok(())
    }

    fn set<T>(&self, description: *mut c_void, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: reads the value, whose type is the attribute's, by the callers above.
        let status = unsafe {
            (self.functions.cublasLtMatmulDescSetAttribute)(
                description,
                attribute,
                (&raw const *value).cast(),
                size_of_val(value),
            )
        };
        check("cublasLtMatmulDescSetAttribute", status)
    }

    fn layout(
        &self,
        dtype: Dtype,
        [rows, columns]: [usize; 2],
        stride: usize,
    ) -> Result<*mut c_void> {
        let mut layout = null_mut();
        // SAFETY: writes one handle.
        let status = unsafe {
            (self.functions.cublasLtMatrixLayoutCreate)(
                &raw mut layout,
                data_type(dtype),
                rows as u64,
                columns as u64,
                stride as u64,
            )
        };
        check("cublasLtMatrixLayoutCreate", status).map(|()| layout)
    }

    /// Those that the heuristics give, at least one, the most promising first.
    fn algorithms(
        &self,
        gemm: &Gemm,
        at: GemmOperands,
        asked: AskedMatmul,
    ) -> Result<Vec<[u64; 8]>> {
        let AskedMatmul { description, layouts: [right, left, out] } = asked;
        let preference = self.preference(at)?;
        let (mut found, mut count) = ([Heuristic::default(); N_CANDIDATES as usize], 0);
        let most = c_int::from(if self.measures(gemm) { N_CANDIDATES } else { 1 });
        // SAFETY: all handles were just made; writes at most as many results, and their count.
        let status = unsafe {
            (self.functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                description,
                right,
                left,
                out,
                out,
                preference,
                most,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        // SAFETY: no longer used.
        unsafe { (self.functions.cublasLtMatmulPreferenceDestroy)(preference) };
        if status != 0 || count == 0 || found[0].status != 0 {
            let name = format!("no algorithm for {gemm:?}");
            let call = "cublasLtMatmulAlgoGetHeuristic";
            return Err(ComputeError::Cuda { call, code: status, name });
        }
        let found = found.into_iter().take(count.cast_unsigned() as usize);
        Ok(found.filter(|found| found.status == 0).map(|found| found.algorithm).collect())
    }

    fn preference(&self, at: GemmOperands) -> Result<*mut c_void> {
        let mut preference = null_mut();
        // SAFETY: writes one handle.
        let status =
            unsafe { (self.functions.cublasLtMatmulPreferenceCreate)(&raw mut preference) };
        check("cublasLtMatmulPreferenceCreate", status)?;
        let [right, left, out] = at.alignments();
        let alignments = (MIN_ALIGNMENT..).zip([right, left, out, out]);
        let mut status = 0;
        for (attribute, bytes) in alignments {
            // SAFETY: reads one u32, which is the attributes' type.
            status |= unsafe {
                (self.functions.cublasLtMatmulPreferenceSetAttribute)(
                    preference,
                    attribute,
                    (&raw const bytes).cast(),
                    size_of_val(&bytes),
                )
            };
        }
        let most = WORKSPACE;
        // SAFETY: reads one size, which is the attribute's type.
        status |= unsafe {
            (self.functions.cublasLtMatmulPreferenceSetAttribute)(
                preference,
                MAX_WORKSPACE,
                (&raw const most).cast(),
                size_of_val(&most),
            )
        };
        check("cublasLtMatmulPreferenceSetAttribute", status).map(|()| preference)
    }
}

/// Whether a matmul may be run several times in its place: what it writes is written again, and to what it
/// adds to it can add next to nothing, unless a bias goes with it.
fn can_be_repeated(gemm: &Gemm) -> bool {
    !gemm.add || gemm.epilogue == Epilogue::Nothing
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own. Descriptions are a few hundred bytes each and go
        // with the process.
        unsafe { (self.functions.cublasLtDestroy)(self.handle) };
    }
}

/// `cudaDataType`; bytes are e4m3.
fn data_type(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F16 => 2,
        Dtype::Bf16 => 14,
        Dtype::U8 => 28,
        _ => R_32F,
    }
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // Taken from `cublasStatus_t`.
    let name = match code {
        1 => "not initialised",
        3 => "out of memory",
        7 => "invalid value",
        8 => "the GPU lacks a feature",
        13 => "execution failed",
        15 => "not supported",
        _ => "an error of cuBLASLt",
    };
    Err(ComputeError::Cuda { call, code, name: name.into() })
}

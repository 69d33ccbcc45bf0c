//! NVIDIA's libraries, opened when a GPU is asked for: nothing is linked, so the program starts where
//! none of them exists. A library is a struct of the functions that are used of it.

use std::path::PathBuf;

use libloading::Library;

use crate::{ComputeError, Result};

/// Where toolkits lie that the system's loader was not told of.
const USUAL_PLACES: [&str; 2] =
    ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"];

/// The first of some names that can be opened, asked of the loader and then in the usual places.
pub(super) fn open(names: &[String]) -> Result<Library> {
    let places = USUAL_PLACES
        .iter()
        .flat_map(|place| names.iter().map(move |name| PathBuf::from(place).join(name)));
    let mut all = names.iter().map(PathBuf::from).chain(places);
    all.find_map(|path| open_at(&path))
        .ok_or_else(|| ComputeError::CudaLibrary { names: names.join(", ") })
}

#[allow(unsafe_code)]
fn open_at(path: &std::path::Path) -> Option<Library> {
    // SAFETY: opening a library runs its initialisers. The names are those of NVIDIA's libraries,
    // whose initialisers are made to run inside any process.
    unsafe { Library::new(path) }.ok()
}

/// The names of a library under Linux, newest version first.
pub(super) fn names(stem: &str, versions: &[&str]) -> Vec<String> {
    versions.iter().map(|version| format!("lib{stem}.so.{version}")).collect()
}

/// A struct with a pointer to each function that is listed, all of which return a status.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($function:ident($($argument:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)] // The library's own names.
        struct $name {
            $($function: unsafe extern "C" fn($($argument),*) -> i32,)*
            /// Keeps the functions where they are.
            _library: libloading::Library,
        }

        #[allow(unsafe_code)]
        impl $name {
            /// Finds all of them.
            fn find(library: libloading::Library) -> crate::Result<Self> {
                Ok(Self {
                    $($function: {
                        let name = concat!(stringify!($function), "\0");
                        // SAFETY: the type is the function's own, copied from the library's header,
                        // and the library outlives the pointer, which lies beside it.
                        let found = unsafe { library.get(name.as_bytes()) };
                        *found.map_err(|_| $crate::ComputeError::CudaFunction {
                            name: stringify!($function),
                        })?
                    },)*
                    _library: library,
                })
            }
        }
    };
}
pub(super) use functions;

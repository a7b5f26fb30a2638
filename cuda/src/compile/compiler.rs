//! Kernels, compiled with NVRTC for the device's architecture and kept on disk as cubins.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};

use super::store::Store;
use crate::driver::CudaError;

/// The NVRTC from which on it keeps what it compiles in the driver's cache, by its own guide.
const CACHES_SINCE: (i32, i32) = (12, 9);

/// A kernel source that is part of this binary.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its file, for messages.
    pub(crate) file: &'static str,
    /// Its text.
    pub(crate) text: &'static str,
    /// What it is compiled with, by name.
    definitions: Vec<(&'static str, String)>,
}

impl Source {
    /// A text out of a file. What every kernel needs is defined: `LANES_ALL`, the mask of all lanes of a warp.
    #[must_use]
    pub fn new(file: &'static str, text: &'static str) -> Self {
        Self { file, text, definitions: vec![("LANES_ALL", format!("{:#x}u", u32::MAX))] }
    }

    /// Defines a number that launcher and kernel share, or the type that the kernel is for.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.definitions.push((name, value.to_string()));
        self
    }

    fn options(&self) -> impl Iterator<Item = String> {
        self.definitions.iter().map(|(name, value)| format!("--define-macro={name}={value}"))
    }
}

/// What to compile for and how.
#[derive(Clone, Debug)]
pub struct Compiler {
    /// Such as `sm_90`.
    arch: String,
    include_dir: Option<PathBuf>,
    store: Option<Store>,
    /// What this process has needed before.
    cubins: Arc<Mutex<HashMap<blake3::Hash, Arc<[u8]>>>>,
}

impl Compiler {
    /// A compiler for a compute capability. `include_dir` holds `cuda_fp16.h`; cubins are kept in `cache_dir`.
    #[must_use]
    pub fn new((major, minor): (i32, i32), include_dir: Option<PathBuf>, cache_dir: Option<PathBuf>) -> Self {
        let store = cache_dir.map(Store::new);
        Self { arch: format!("sm_{major}{minor}"), include_dir, store, cubins: Arc::default() }
    }

    /// The cubin of a source: from the cache, or compiled now.
    ///
    /// # Errors
    /// NVRTC is missing, or the source does not compile.
    pub fn cubin(&self, source: &Source) -> Result<Arc<[u8]>, CudaError> {
        // SAFETY: loads the library, nothing else.
        if !unsafe { nvrtc_sys::is_culib_present() } {
            return Err(CudaError::NoLibrary {
                library: "NVRTC",
                looked_for: vec!["libnvrtc.so.13".to_owned()],
            });
        }
        let key = self.key(source);
        let known = |cubins: &Mutex<HashMap<_, _>>| {
            cubins.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
        };
        if let Some(cubin) = known(&self.cubins) {
            return Ok(cubin);
        }
        let cubin = Arc::<[u8]>::from(self.stored_or_compiled(source, &key)?);
        self.cubins.lock().unwrap_or_else(PoisonError::into_inner).insert(key, cubin.clone());
        Ok(cubin)
    }

    /// Whether the cache has the cubin of a source, so that nothing is compiled for it.
    #[must_use]
    pub(crate) fn is_kept(&self, source: &Source) -> bool {
        self.store.as_ref().is_some_and(|store| store.has(&self.key(source)))
    }

    fn stored_or_compiled(&self, source: &Source, key: &blake3::Hash) -> Result<Vec<u8>, CudaError> {
        if let Some(cubin) = self.store.as_ref().and_then(|store| store.read(key)) {
            return Ok(cubin);
        }
        let begun = Instant::now();
        let cubin = self.compile(source)?;
        tracing::debug!(source.file, elapsed = ?begun.elapsed(), "compiled");
        if let Some(store) = &self.store {
            store.keep(key, &cubin);
        }
        Ok(cubin)
    }

    /// All that a cubin depends on.
    fn key(&self, source: &Source) -> blake3::Hash {
        let (major, minor) = version();
        let mut hasher = blake3::Hasher::new();
        hasher.update(source.text.as_bytes());
        source.options().for_each(|option| {
            hasher.update(option.as_bytes());
        });
        hasher.update(format!("{} nvrtc {major}.{minor}", self.arch).as_bytes());
        hasher.finalize()
    }

    fn compile(&self, source: &Source) -> Result<Vec<u8>, CudaError> {
        let call = |call| {
            move |error: nvrtc::NvrtcError| CudaError::Call { call, code: None, reason: format!("{error:?}") }
        };
        let text = CString::new(source.text).expect("sources hold no zero byte");
        let name = CString::new(source.file).expect("file names hold no zero byte");
        let program = nvrtc::create_program(&text, Some(&name)).map_err(call("nvrtcCreateProgram"))?;
        let mut options = vec![format!("--gpu-architecture={}", self.arch), "--std=c++17".to_owned()];
        if version() >= CACHES_SINCE {
            // Cubins are kept here; all threads that compile would go to the driver's cache as well.
            options.push("--no-cache".to_owned());
        }
        options.extend(source.options());
        if let Some(dir) = &self.include_dir {
            options.push(format!("--include-path={}", dir.display()));
        }
        // SAFETY: the program was made above and is destroyed below.
        let compiled = unsafe { nvrtc::compile_program(program, &options) };
        let outcome = match compiled {
            Ok(()) => cubin_of(program),
            Err(_) => {
                Err(CudaError::Compile { file: source.file, arch: self.arch.clone(), log: log_of(program) })
            }
        };
        // SAFETY: made above, destroyed once.
        unsafe { nvrtc::destroy_program(program) }.map_err(call("nvrtcDestroyProgram"))?;
        outcome
    }
}

/// NVRTC's, major and minor.
fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for the call.
    unsafe { nvrtc_sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

fn cubin_of(program: nvrtc_sys::nvrtcProgram) -> Result<Vec<u8>, CudaError> {
    let call = |call| {
        move |error: nvrtc::NvrtcError| CudaError::Call { call, code: None, reason: format!("{error:?}") }
    };
    let mut n_bytes = 0;
    // SAFETY: the program is compiled, and the pointer valid.
    unsafe { nvrtc_sys::nvrtcGetCUBINSize(program, &mut n_bytes) }
        .result()
        .map_err(call("nvrtcGetCUBINSize"))?;
    let mut cubin = vec![0u8; n_bytes];
    // SAFETY: the buffer has the length that was asked for.
    unsafe { nvrtc_sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast::<c_char>()) }
        .result()
        .map_err(call("nvrtcGetCUBIN"))?;
    Ok(cubin)
}

fn log_of(program: nvrtc_sys::nvrtcProgram) -> String {
    // SAFETY: the program exists.
    let log = unsafe { nvrtc::get_program_log(program) }.unwrap_or_default();
    let bytes: Vec<u8> = log.into_iter().map(|c| c as u8).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map_or_else(|_| String::new(), |log| log.to_string_lossy().into_owned())
}

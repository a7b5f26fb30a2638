//! What runs the models: the choice between processor and GPU, and how a GPU's memory is shared out.

use std::path::Path;
use std::thread::JoinHandle;

use trellis_cuda::{Card, CudaBackend, CudaOptions, Gpu, probe};
use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::cpu::{CpuBackend, CpuError, CpuOptions};
use trellis_engine::model::{Dtype, Model};

use crate::config::{Config, Device, Sizes};
use crate::daemon::DaemonError;
use crate::machine;
use crate::shares::Needs;

/// Where compiled kernels are kept, in the daemon's cache.
pub(crate) const KERNELS_DIR: &str = "cuda";

/// KV cache of a model on the CPU, unless one context needs more.
const CPU_KV_BYTES: u64 = 256 << 20;
/// The most that a KV cache on the CPU takes without being told to: one user could fill it.
const CPU_KV_BYTES_MAX: u64 = 4 << 30;

/// What is left free of a card for steps, modules and the driver: a part that is always there, and a part that grows
/// with the card, as do the batches that it is used for.
const RESERVE_BYTES: u64 = 512 << 20;
const RESERVE_PART: u64 = 25;

/// Drivers from this version of CUDA on have all that is called.
const CUDA_MAJOR: u32 = 13;

/// The device that all models run on.
#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    Cpu,
    Cuda { ordinal: usize, card: Card },
}

/// Chooses the device. Compiled kernels are kept in `cache_dir`, which only the daemon's user may write to.
///
/// # Errors
/// A GPU was asked for or found, and cannot be used.
pub(crate) fn choose(device: Device, cache_dir: &Path) -> Result<Chosen, DaemonError> {
    if device == Device::Cpu {
        return Ok(Chosen::Cpu);
    }
    let driver = probe::driver();
    if device == Device::Auto && !driver.has_gpu() {
        let why = if driver.is_hidden() { " (CUDA_VISIBLE_DEVICES hides it)" } else { "" };
        tracing::info!("no NVIDIA GPU{why}: computing on the CPU");
        return Ok(Chosen::Cpu);
    }
    let ordinal = device.ordinal();
    // A context takes as long to begin as the libraries take to be found. An older driver may lack what opening calls.
    let is_new = driver.version().is_some_and(|version| version.major >= CUDA_MAJOR);
    let opening = is_new.then(|| std::thread::spawn(move || Gpu::open(ordinal)));
    let probe = probe::probe();
    let problems = probe.problems();
    if !problems.is_empty() {
        return Err(DaemonError::CudaUnusable { problems });
    }
    // What goes wrong there goes wrong here as well, and is said.
    let opened = opening.map(JoinHandle::join);
    let card = Card::open(ordinal, Some(&cache_dir.join(KERNELS_DIR)))?;
    drop(opened);
    let file =
        |library: &probe::Library| library.loaded.as_ref().map(probe::Loaded::file).unwrap_or_default();
    tracing::info!(
        nvrtc = file(&probe.nvrtc),
        cublas_lt = file(&probe.cublas_lt),
        "computing on {}",
        describe(&probe.driver, ordinal)
    );
    Ok(Chosen::Cuda { ordinal, card })
}

/// The device that would be chosen, looked for as [`choose`] does, and not opened.
///
/// # Errors
/// A GPU was asked for or found, and something is missing that it needs.
pub(crate) fn check(device: Device) -> Result<Device, DaemonError> {
    if device == Device::Cpu || (device == Device::Auto && !probe::driver().has_gpu()) {
        return Ok(Device::Cpu);
    }
    let problems = probe::probe().problems();
    match problems.is_empty() {
        true if device == Device::Auto => Ok(Device::Cuda),
        true => Ok(device),
        false => Err(DaemonError::CudaUnusable { problems }),
    }
}

/// Bytes that models could take of a device that is not opened, if nothing else were on it: of a GPU that is not known.
pub(crate) fn total_bytes(device: Device) -> u64 {
    if device.is_cpu() { machine::memory_bytes() } else { u64::MAX }
}

/// What a model needs at least of a device that is not opened. On a GPU memory for steps comes to that.
///
/// # Errors
/// The device does not run such a model.
pub(crate) fn least_needs(device: Device, model: &Model, config: &Config) -> Result<Needs, DaemonError> {
    if device.is_cpu() {
        return needs_cpu(model, config);
    }
    let dtype = config.dtype.chosen().unwrap_or(model.dtype);
    let weight_bytes = model.n_parameters * dtype.n_bytes() as u64;
    Ok(Needs {
        fixed_bytes: weight_bytes,
        weight_bytes,
        page_bytes: CudaBackend::page_bytes(&model.config, dtype),
        n_granule_pages: 1,
        n_pages_min: model.config.n_positions.div_ceil(PAGE_LEN),
        kv_bytes_most: u64::MAX,
    })
}

/// Makes a device that failed as new, so that it can be chosen again. Nothing of it may be held any more.
///
/// # Errors
/// The driver does not give it back to this process.
pub(crate) fn reset(device: Device) -> Result<(), DaemonError> {
    if device == Device::Cpu {
        return Ok(());
    }
    Ok(trellis_cuda::reset(device.ordinal())?)
}

/// `NVIDIA H100 80GB HBM3, driver 580.159.04 for CUDA 13.0`
pub(crate) fn describe(driver: &probe::Driver, ordinal: usize) -> String {
    let name = driver.devices.get(ordinal).map_or("no device", |device| &device.name);
    let release = driver.release.as_ref().map(|release| format!(" {release}")).unwrap_or_default();
    let version = driver.version().map(|version| format!(" for CUDA {version}")).unwrap_or_default();
    format!("{name}, driver{release}{version}")
}

impl Chosen {
    /// The choice as the settings would name it.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Cuda { ordinal: 0, .. } => Device::Cuda,
            Self::Cuda { ordinal, .. } => Device::Ordinal(*ordinal),
        }
    }

    /// The sizes for this device, as the settings have them.
    pub(crate) fn sizes(&self, config: &Config) -> Sizes {
        config.sizes(match self {
            Self::Cpu => Sizes::CPU,
            Self::Cuda { .. } => Sizes::CUDA,
        })
    }

    /// What a model needs of the device, if its KV may ever have so many bytes.
    ///
    /// # Errors
    /// The device does not run such a model.
    pub(crate) fn needs(
        &self,
        model: &Model,
        config: &Config,
        kv_bytes_max: u64,
    ) -> Result<Needs, DaemonError> {
        match self {
            Self::Cpu => needs_cpu(model, config),
            Self::Cuda { card, .. } => needs_cuda(card, model, config, kv_bytes_max),
        }
    }

    /// Bytes that models may take of the device, those included that are on it.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn capacity_bytes(&self) -> Result<u64, DaemonError> {
        match self {
            // What is not known is found out when it is taken.
            Self::Cpu => Ok(machine::available_bytes().unwrap_or(u64::MAX)),
            Self::Cuda { card, .. } => {
                card.gpu().make_current()?;
                let reserve_bytes = reserve_bytes(card.gpu().total_bytes() as u64);
                Ok((card.gpu().free_bytes()? as u64).saturating_sub(reserve_bytes))
            }
        }
    }

    /// Bytes that models could take of the device if nothing else were on it.
    pub(crate) fn total_bytes(&self) -> u64 {
        match self {
            Self::Cpu => machine::memory_bytes(),
            Self::Cuda { card, .. } => {
                let total_bytes = card.gpu().total_bytes() as u64;
                total_bytes.saturating_sub(reserve_bytes(total_bytes))
            }
        }
    }

    /// Waits until the device runs logit programs, or is known not to; before that the host does. Blocks, for ten seconds or
    /// more where the kernels have to be compiled.
    pub(crate) fn wait_for_programs(&self) {
        match self {
            Self::Cpu => {}
            Self::Cuda { card, .. } => card.wait_for_programs(),
        }
    }

    /// Loads a model and gives it so many KV pages; later it may have up to `kv_bytes_max`. `progress` hears bytes
    /// loaded and bytes in all.
    ///
    /// # Errors
    /// The weights cannot be read, the memory does not suffice, or the device failed.
    pub(crate) fn load(
        &self,
        model: &Model,
        config: &Config,
        kv: Kv,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Box<dyn Backend>, DaemonError> {
        match self {
            Self::Cpu => load_cpu(model, config, kv, progress),
            Self::Cuda { card, .. } => load_cuda(card, model, config, kv, progress),
        }
    }
}

fn reserve_bytes(total_bytes: u64) -> u64 {
    RESERVE_BYTES + total_bytes / RESERVE_PART
}

/// KV memory of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kv {
    /// Pages at first.
    pub(crate) n_pages: usize,
    /// What it may ever have, in bytes.
    pub(crate) kv_bytes_max: u64,
}

fn needs_cpu(model: &Model, config: &Config) -> Result<Needs, DaemonError> {
    if let Some(dtype) = config.dtype.chosen().filter(|&dtype| dtype != Dtype::F32) {
        return Err(DaemonError::CpuDtype { dtype });
    }
    let page_bytes = CpuBackend::page_bytes(&model.config);
    let n_pages_min = model.config.n_positions.div_ceil(PAGE_LEN);
    let context_bytes = n_pages_min as u64 * page_bytes;
    if config.kv_bytes.is_none() && context_bytes > CPU_KV_BYTES_MAX {
        return Err(DaemonError::KvTooSmall {
            name: model.name.clone(),
            n_positions: model.config.n_positions,
            needed_bytes: context_bytes,
            kv_bytes: CPU_KV_BYTES_MAX,
        });
    }
    let weight_bytes = model.n_parameters * size_of::<f32>() as u64;
    Ok(Needs {
        fixed_bytes: weight_bytes,
        weight_bytes,
        page_bytes,
        n_granule_pages: CpuBackend::N_GRANULE_PAGES,
        n_pages_min,
        // Memory that is not used is not taken.
        kv_bytes_most: config.kv_bytes.unwrap_or(context_bytes.clamp(CPU_KV_BYTES, CPU_KV_BYTES_MAX)),
    })
}

fn load_cpu(
    model: &Model,
    config: &Config,
    kv: Kv,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Box<dyn Backend>, DaemonError> {
    let name = &model.name;
    let sizes = config.sizes(Sizes::CPU);
    let page_bytes = CpuBackend::page_bytes(&model.config);
    let options = CpuOptions {
        n_pages: kv.n_pages,
        n_host_pages: (sizes.kv_host_bytes / page_bytes) as usize,
        n_threads: None,
        n_rows_max: sizes.n_step_rows,
        n_tokens_max: sizes.n_tokens_max(),
    };
    let total_bytes = model.n_parameters * size_of::<f32>() as u64;
    let mut done_bytes = 0;
    let backend = CpuBackend::with_tensors(&model.config, &options, |tensor, values| {
        model.checkpoint.read_f32(tensor, values)?;
        done_bytes += size_of_val(values) as u64;
        progress(done_bytes, total_bytes);
        Ok::<(), CpuError>(())
    });
    let backend =
        backend.map_err(|source| DaemonError::Backend { name: name.clone(), source: Box::new(source) })?;
    Ok(Box::new(backend))
}

fn cuda_options(config: &Config, kv_bytes: u64, kv_bytes_max: u64) -> CudaOptions {
    let sizes = config.sizes(Sizes::CUDA);
    CudaOptions {
        dtype: config.dtype.chosen(),
        kv_bytes,
        kv_bytes_max,
        kv_host_bytes: sizes.kv_host_bytes,
        n_rows_max: sizes.n_step_rows,
        n_tokens_max: sizes.n_tokens_max(),
    }
}

fn needs_cuda(card: &Card, model: &Model, config: &Config, kv_bytes_max: u64) -> Result<Needs, DaemonError> {
    let needs = CudaBackend::needs(card, model, &cuda_options(config, 0, kv_bytes_max));
    let needs =
        needs.map_err(|source| DaemonError::Load { name: model.name.clone(), source: Box::new(source) })?;
    Ok(Needs {
        // Models may come to share what they compute in, or not: that depends on which was loaded first.
        fixed_bytes: needs.weight_bytes + needs.step_bytes + needs.all_activation_bytes,
        weight_bytes: needs.weight_bytes,
        page_bytes: needs.page_bytes,
        n_granule_pages: (needs.granule_bytes / needs.page_bytes) as usize,
        n_pages_min: model.config.n_positions.div_ceil(PAGE_LEN),
        kv_bytes_most: u64::MAX,
    })
}

fn load_cuda(
    card: &Card,
    model: &Model,
    config: &Config,
    kv: Kv,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Box<dyn Backend>, DaemonError> {
    let dtype = config.dtype.chosen().unwrap_or(model.dtype);
    let kv_bytes = kv.n_pages as u64 * CudaBackend::page_bytes(&model.config, dtype);
    let options = cuda_options(config, kv_bytes, kv.kv_bytes_max);
    let backend = CudaBackend::load(card, model, &options, progress)
        .map_err(|source| DaemonError::Load { name: model.name.clone(), source: Box::new(source) })?;
    let (n_positions, n_most) = (backend.limits().n_positions_max, model.config.n_positions);
    if n_positions < n_most {
        tracing::warn!(model = model.name, n_positions, n_most, "the rest of the card cuts contexts short");
    }
    Ok(Box::new(backend))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DtypeChoice;

    const KV: Kv = Kv { n_pages: 64, kv_bytes_max: u64::MAX };

    fn draft() -> Model {
        let source = crate::bundled::source("draft").expect("bundled");
        Model::open("draft", &source).expect("a model")
    }

    #[test]
    fn the_processor_computes_in_f32_only() {
        let needs = |dtype| Chosen::Cpu.needs(&draft(), &Config { dtype, ..Config::default() }, 0);
        assert!(matches!(needs(DtypeChoice::Bf16), Err(DaemonError::CpuDtype { .. })));
        assert!(needs(DtypeChoice::F32).expect("it computes in that").n_pages_min > 0);
    }

    #[test]
    fn loading_says_how_far_it_is() {
        let seen = std::sync::Mutex::new(Vec::new());
        let hear = |done: u64, total: u64| seen.lock().expect("no panic").push((done, total));
        Chosen::Cpu.load(&draft(), &Config::default(), KV, &hear).expect("it loads");
        let seen = seen.into_inner().expect("no panic");
        let (done, total) = *seen.last().expect("it was heard");
        assert_eq!(done, total);
        assert!(seen.is_sorted() && seen.len() > 3);
    }
}

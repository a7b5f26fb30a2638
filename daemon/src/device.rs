//! What runs the models: the choice between processor and GPU, and how a GPU's memory is shared out.

use std::path::Path;

use trellis_cuda::{Card, CudaBackend, CudaOptions, Needs, probe};
use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::cpu::{CpuBackend, CpuError, CpuOptions};
use trellis_engine::model::{Dtype, Model, ModelConfig};

use crate::config::{Config, Device, Sizes};
use crate::daemon::DaemonError;

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

/// The device that all models run on.
#[derive(Debug)]
pub(crate) enum Chosen {
    Cpu,
    Cuda(Card),
}

/// Chooses the device. Compiled kernels are kept in `cache_dir`, which nobody else may write to.
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
    let probe = probe::probe();
    let problems = probe.problems();
    if !problems.is_empty() {
        return Err(DaemonError::CudaUnusable { problems });
    }
    let card = Card::open(0, Some(&cache_dir.join(KERNELS_DIR)))?;
    let file =
        |library: &probe::Library| library.loaded.as_ref().map(probe::Loaded::file).unwrap_or_default();
    tracing::info!(
        nvrtc = file(&probe.nvrtc),
        cublas_lt = file(&probe.cublas_lt),
        "computing on {}",
        describe(&probe.driver)
    );
    Ok(Chosen::Cuda(card))
}

/// Makes a device that failed as new, so that it can be chosen again. Nothing of it may be held any more.
///
/// # Errors
/// The driver does not give it back to this process.
pub(crate) fn reset(device: Device) -> Result<(), DaemonError> {
    if device == Device::Cpu {
        return Ok(());
    }
    Ok(trellis_cuda::reset(0)?)
}

/// `NVIDIA H100 80GB HBM3, driver 580.159.04 for CUDA 13.0`
pub(crate) fn describe(driver: &probe::Driver) -> String {
    let name = driver.devices.first().map_or("no device", |device| &device.name);
    let release = driver.release.as_ref().map(|release| format!(" {release}")).unwrap_or_default();
    let version = driver.version().map(|version| format!(" for CUDA {version}")).unwrap_or_default();
    format!("{name}, driver{release}{version}")
}

impl Chosen {
    /// The choice as the settings would name it.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Cuda(_) => Device::Cuda,
        }
    }

    /// The sizes for this device, as the settings have them.
    pub(crate) fn sizes(&self, config: &Config) -> Sizes {
        config.sizes(match self {
            Self::Cpu => Sizes::CPU,
            Self::Cuda(_) => Sizes::CUDA,
        })
    }

    /// Loads the first of `models`; the others will follow, and find the room that they need. `progress` hears bytes
    /// loaded and bytes in all.
    ///
    /// # Errors
    /// The weights cannot be read, the memory does not suffice, or the device failed.
    pub(crate) fn load(
        &self,
        models: &[Model],
        config: &Config,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Box<dyn Backend>, DaemonError> {
        match self {
            Self::Cpu => load_cpu(&models[0], config, progress),
            Self::Cuda(card) => load_cuda(card, models, config, progress),
        }
    }
}

fn load_cpu(
    model: &Model,
    config: &Config,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Box<dyn Backend>, DaemonError> {
    let name = &model.name;
    if let Some(dtype) = config.dtype.chosen().filter(|&dtype| dtype != Dtype::F32) {
        return Err(DaemonError::CpuDtype { dtype });
    }
    let Sizes { kv_host_bytes, n_step_tokens, n_step_rows } = config.sizes(Sizes::CPU);
    let page_bytes = CpuBackend::page_bytes(&model.config);
    let options = CpuOptions {
        n_pages: n_cpu_pages(name, &model.config, config.kv_bytes)?,
        n_host_pages: (kv_host_bytes / page_bytes) as usize,
        n_threads: None,
        n_rows_max: n_step_rows,
        n_tokens_max: n_step_tokens,
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

fn n_cpu_pages(name: &str, model: &ModelConfig, kv_bytes: Option<u64>) -> Result<usize, DaemonError> {
    let page_bytes = CpuBackend::page_bytes(model);
    let needed_bytes = kv_bytes_of_context(model, page_bytes);
    // Memory that is not used is not taken.
    let kv_bytes = kv_bytes.unwrap_or(needed_bytes.clamp(CPU_KV_BYTES, CPU_KV_BYTES_MAX));
    check_kv(name, model, page_bytes, kv_bytes)?;
    Ok((kv_bytes / page_bytes) as usize)
}

fn kv_bytes_of_context(model: &ModelConfig, page_bytes: u64) -> u64 {
    model.n_positions.div_ceil(PAGE_LEN) as u64 * page_bytes
}

/// Whether the longest context has room in so much KV cache.
fn check_kv(name: &str, model: &ModelConfig, page_bytes: u64, kv_bytes: u64) -> Result<(), DaemonError> {
    let needed_bytes = kv_bytes_of_context(model, page_bytes);
    if kv_bytes < needed_bytes {
        let n_positions = model.n_positions;
        return Err(DaemonError::KvTooSmall { name: name.to_owned(), n_positions, needed_bytes, kv_bytes });
    }
    Ok(())
}

fn load_cuda(
    card: &Card,
    models: &[Model],
    config: &Config,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Box<dyn Backend>, DaemonError> {
    let model = &models[0];
    let Sizes { kv_host_bytes, n_step_tokens, n_step_rows } = config.sizes(Sizes::CUDA);
    let mut options = CudaOptions {
        dtype: config.dtype.chosen(),
        kv_bytes: 0,
        kv_bytes_max: 0,
        kv_host_bytes,
        n_rows_max: n_step_rows,
        n_tokens_max: n_step_tokens,
    };
    options.kv_bytes = match config.kv_bytes {
        Some(kv_bytes) => {
            let dtype = config.dtype.chosen().unwrap_or(model.dtype);
            let page_bytes = CudaBackend::page_bytes(&model.config, dtype);
            check_kv(&model.name, &model.config, page_bytes, kv_bytes)?;
            kv_bytes
        }
        None => {
            let needs = |model: &Model| {
                CudaBackend::needs(card, model, &options).map_err(|source| DaemonError::Load {
                    name: model.name.clone(),
                    source: Box::new(source),
                })
            };
            let needs = models.iter().map(needs).collect::<Result<Vec<_>, _>>()?;
            let free_bytes = card.gpu().free_bytes()? as u64;
            kv_share(free_bytes, card.gpu().total_bytes() as u64, &needs)
        }
    };
    options.kv_bytes_max = options.kv_bytes;
    let backend = CudaBackend::load(card, model, &options, progress)
        .map_err(|source| DaemonError::Load { name: model.name.clone(), source: Box::new(source) })?;
    let (n_positions, n_most) = (backend.limits().n_positions_max, model.config.n_positions);
    if n_positions < n_most {
        tracing::warn!(model = model.name, n_positions, n_most, "the rest of the card cuts contexts short");
    }
    Ok(Box::new(backend))
}

/// Bytes of KV of the first of the models still to be loaded: its even share of what they and the reserve leave, if that is
/// enough for a short context.
fn kv_share(free_bytes: u64, total_bytes: u64, needs: &[Needs]) -> u64 {
    let reserve = RESERVE_BYTES + total_bytes / RESERVE_PART;
    let own: u64 = needs.iter().map(|needs| needs.weight_bytes + needs.step_bytes).sum();
    let shared = needs.iter().map(|needs| needs.activation_bytes).max().unwrap_or(0);
    let share = free_bytes.saturating_sub(reserve + own + shared) / needs.len() as u64;
    share.max(needs[0].kv_bytes_min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DtypeChoice;

    const GIB: u64 = 1 << 30;

    fn needs(weight_bytes: u64) -> Needs {
        Needs {
            weight_bytes,
            step_bytes: 10 << 20,
            activation_bytes: GIB,
            page_bytes: 2 << 20,
            granule_bytes: 64 << 20,
            kv_bytes_min: 256 << 20,
        }
    }

    #[test]
    fn models_on_one_card_get_even_shares() {
        let total = 80 * GIB;
        let mut needs = [needs(16 * GIB), needs(2 * GIB), needs(6 * GIB)];
        let mut free = total;
        let mut shares = Vec::new();
        for idx in 0..needs.len() {
            let share = kv_share(free, total, &needs[idx..]);
            shares.push(share);
            free -= needs[idx].weight_bytes + needs[idx].step_bytes + needs[idx].activation_bytes + share;
            // The first brings what all compute in.
            needs.iter_mut().for_each(|needs| needs.activation_bytes = 0);
        }
        let reserve = RESERVE_BYTES + total / RESERVE_PART;
        let even = (total - reserve - 25 * GIB - 3 * (10 << 20)) / 3;
        assert!(shares.iter().all(|share| share.abs_diff(even) < 8), "{shares:?} {even}");
        assert!(free.abs_diff(reserve) < 8, "{free} {reserve}");
    }

    #[test]
    fn models_that_do_not_fit_ask_for_a_short_context() {
        assert_eq!(kv_share(10 * GIB, 10 * GIB, &[needs(6 * GIB), needs(6 * GIB)]), 256 << 20);
    }

    #[test]
    fn the_processor_computes_in_f32_only() {
        let source = crate::bundled::source("draft").expect("bundled");
        let models = [Model::open("draft", &source).expect("a model")];
        let load = |dtype| {
            let config = Config { dtype, ..Config::default() };
            Chosen::Cpu.load(&models, &config, &|_, _| {}).map(|backend| backend.n_pages())
        };
        assert!(matches!(load(DtypeChoice::Bf16), Err(DaemonError::CpuDtype { .. })));
        assert!(load(DtypeChoice::F32).expect("it loads") > 0);
    }

    #[test]
    fn loading_says_how_far_it_is() {
        let source = crate::bundled::source("draft").expect("bundled");
        let models = [Model::open("draft", &source).expect("a model")];
        let seen = std::sync::Mutex::new(Vec::new());
        let hear = |done: u64, total: u64| seen.lock().expect("no panic").push((done, total));
        Chosen::Cpu.load(&models, &Config::default(), &hear).expect("it loads");
        let seen = seen.into_inner().expect("no panic");
        let (done, total) = *seen.last().expect("it was heard");
        assert_eq!(done, total);
        assert!(seen.is_sorted() && seen.len() > 3);
    }
}

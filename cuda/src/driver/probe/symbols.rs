//! Functions that this crate calls in each library; cudarc panics where one is missing.

/// Of the driver.
pub(super) const DRIVER: [&str; 64] = [
    "cuCtxGetDevice",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncGetParamInfo",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveClusters",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Of NVRTC.
pub(super) const NVRTC: [&str; 8] = [
    "nvrtcCompileProgram",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcVersion",
];

/// Of cuBLASLt.
pub(super) const CUBLAS_LT: [&str; 14] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    /// Functions of `cudarc`'s `result` modules, and what they call.
    const WRAPPERS: [(&str, &[&str]); 60] = [
        ("compile_program", &["nvrtcCompileProgram"]),
        ("create_handle", &["cublasLtCreate"]),
        ("create_matmul_desc", &["cublasLtMatmulDescCreate"]),
        ("create_matmul_pref", &["cublasLtMatmulPreferenceCreate"]),
        ("create_matrix_layout", &["cublasLtMatrixLayoutCreate"]),
        ("create_program", &["nvrtcCreateProgram"]),
        ("ctx::set_current", &["cuCtxSetCurrent"]),
        ("ctx::synchronize", &["cuCtxSynchronize"]),
        ("destroy_handle", &["cublasLtDestroy"]),
        ("destroy_matmul_desc", &["cublasLtMatmulDescDestroy"]),
        ("destroy_matmul_pref", &["cublasLtMatmulPreferenceDestroy"]),
        ("destroy_matrix_layout", &["cublasLtMatrixLayoutDestroy"]),
        ("destroy_program", &["nvrtcDestroyProgram"]),
        ("device::get", &["cuDeviceGet"]),
        ("device::get_attribute", &["cuDeviceGetAttribute"]),
        ("device::get_count", &["cuDeviceGetCount"]),
        ("device::get_name", &["cuDeviceGetName"]),
        ("device::total_mem", &["cuDeviceTotalMem_v2"]),
        ("event::create", &["cuEventCreate"]),
        ("event::destroy", &["cuEventDestroy_v2"]),
        ("event::elapsed", &["cuEventElapsedTime_v2"]),
        ("event::query", &["cuEventQuery"]),
        ("event::record", &["cuEventRecord"]),
        ("event::synchronize", &["cuEventSynchronize"]),
        ("free_host", &["cuMemFreeHost"]),
        ("free_sync", &["cuMemFree_v2"]),
        ("function::get_function_attribute", &["cuFuncGetAttribute"]),
        ("function::set_function_attribute", &["cuFuncSetAttribute"]),
        ("get_matmul_algo_heuristic", &["cublasLtMatmulAlgoGetHeuristic"]),
        ("get_program_log", &["nvrtcGetProgramLogSize", "nvrtcGetProgramLog"]),
        ("graph::destroy", &["cuGraphDestroy"]),
        ("graph::exec_destroy", &["cuGraphExecDestroy"]),
        ("graph::instantiate", &["cuGraphInstantiateWithFlags"]),
        ("graph::launch", &["cuGraphLaunch"]),
        ("graph::upload", &["cuGraphUpload"]),
        ("init", &["cuInit"]),
        ("malloc_host", &["cuMemHostAlloc"]),
        ("malloc_sync", &["cuMemAlloc_v2"]),
        ("matmul", &["cublasLtMatmul"]),
        ("mem_get_info", &["cuMemGetInfo_v2"]),
        ("memcpy_dtod_async", &["cuMemcpyDtoDAsync_v2"]),
        ("memcpy_dtoh_async", &["cuMemcpyDtoHAsync_v2"]),
        ("memcpy_dtoh_sync", &["cuMemcpyDtoH_v2"]),
        ("memcpy_htod_async", &["cuMemcpyHtoDAsync_v2"]),
        ("memcpy_htod_sync", &["cuMemcpyHtoD_v2"]),
        ("memset_d8_async", &["cuMemsetD8Async"]),
        ("module::get_function", &["cuModuleGetFunction"]),
        ("module::load_data", &["cuModuleLoadData"]),
        ("module::unload", &["cuModuleUnload"]),
        ("primary_ctx::release", &["cuDevicePrimaryCtxRelease_v2"]),
        ("primary_ctx::retain", &["cuDevicePrimaryCtxRetain"]),
        ("set_matmul_desc_attribute", &["cublasLtMatmulDescSetAttribute"]),
        ("set_matmul_pref_attribute", &["cublasLtMatmulPreferenceSetAttribute"]),
        ("stream::begin_capture", &["cuStreamBeginCapture_v2"]),
        ("stream::create", &["cuStreamCreate"]),
        ("stream::destroy", &["cuStreamDestroy_v2"]),
        ("stream::end_capture", &["cuStreamEndCapture"]),
        ("stream::is_capturing", &["cuStreamIsCapturing"]),
        ("stream::synchronize", &["cuStreamSynchronize"]),
        ("stream::wait_event", &["cuStreamWaitEvent"]),
    ];

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("the folder can be read") {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "rs") && !path.ends_with("symbols.rs") {
                // What tests alone call is missed by nobody else.
                let stem = path.file_stem().and_then(|stem| stem.to_str());
                if stem.is_none_or(|stem| !stem.ends_with("_tests")) {
                    found.push(path);
                }
            }
        }
    }

    /// The calls `PREFIXname(` in a text; `name` may have `::` in it.
    fn calls<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        text.match_indices(prefix).filter_map(move |(at, _)| {
            let before = text[..at].chars().next_back();
            let rest = &text[at + prefix.len()..];
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':')?;
            let is_name = before.is_none_or(|c| !c.is_alphanumeric() && c != '_');
            (is_name && rest[end..].starts_with('(')).then_some(&rest[..end])
        })
    }

    #[test]
    fn every_function_that_is_called_is_checked_for() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        if !folder.is_dir() {
            eprintln!("skipped: the sources are on another machine");
            return;
        }
        let mut files = Vec::new();
        sources(&folder, &mut files);
        let known: Vec<&str> = DRIVER.into_iter().chain(NVRTC).chain(CUBLAS_LT).collect();
        let (mut n_calls, mut unknown) = (0, Vec::new());
        for file in files {
            let text = fs::read_to_string(&file).expect("it is text");
            let raw = ["sys::", "lt::", "nvrtc_sys::"].into_iter().flat_map(|prefix| calls(&text, prefix));
            let is_raw = |name: &&str| ["cu", "nvrtc"].iter().any(|start| name.starts_with(start));
            for name in raw.filter(is_raw) {
                if !known.contains(&name) {
                    unknown.push(format!("{}: {name} is not checked for", file.display()));
                }
                n_calls += 1;
            }
            let wrapped = ["result::", "nvrtc::"].into_iter().flat_map(|prefix| calls(&text, prefix));
            for name in wrapped.filter(|name| !name.starts_with("sys::")) {
                let wrapper = WRAPPERS.iter().find(|(known, _)| *known == name);
                match wrapper {
                    None => unknown.push(format!("{}: what does {name} call?", file.display())),
                    Some((_, symbols)) => {
                        assert!(symbols.iter().all(|symbol| known.contains(symbol)), "{name}")
                    }
                }
                n_calls += 1;
            }
        }
        assert_eq!(unknown, [""; 0]);
        assert!(n_calls > 30, "{n_calls}");
    }
}

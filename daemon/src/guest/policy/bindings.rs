//! The host's side of the world `policy`, generated.

wasmtime::component::bindgen!({
    path: "../wit",
    world: "trellis:host/policy",
    imports: { default: trappable },
    exports: { default: async },
    with: {
        "trellis:host/types": crate::guest::bindings::trellis::host::types,
        "trellis:host/models": crate::guest::bindings::trellis::host::models,
        "trellis:host/programs": crate::guest::bindings::trellis::host::programs,
        "trellis:host/policies.tokenizer": crate::guest::policy::state::PolicyTokenizer,
    },
});

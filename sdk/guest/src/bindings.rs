//! What `wit-bindgen` makes of the package in `wit/`, for what the layer above does not cover.

#![allow(unsafe_code, reason = "generated: the component ABI is a C ABI, and a call across it is unsafe")]
#![allow(
    missing_docs,
    reason = "generated: the text is that of the WIT package, which documents interfaces, not modules"
)]

wit_bindgen::generate!({
    path: "../../wit",
    world: "guest",
    pub_export_macro: true,
    export_macro_name: "export",
    default_bindings_module: "trellis_guest::bindings",
    additional_derives: [PartialEq],
    // Those that borrow: handles are not compared.
    additional_derives_ignore: [
        "generate-request", "guess-source", "logprobs-request", "score-request", "speculate-request",
        "speculate-tree-request", "speculation", "step-request", "stream-options",
    ],
});

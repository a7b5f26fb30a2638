//! What `wit-bindgen` makes of the world `policy`.

#![allow(unsafe_code, reason = "generated: the component ABI is a C ABI, and a call across it is unsafe")]
#![allow(
    missing_docs,
    reason = "generated: the text is that of the WIT package, which documents interfaces, not modules"
)]
#![allow(clippy::too_many_arguments, reason = "generated: the component ABI passes a record as its fields")]

wit_bindgen::generate!({
    path: "../../wit",
    world: "policy",
    with: {
        "trellis:host/types@0.2.0": crate::bindings::trellis::host::types,
        "trellis:host/models@0.2.0": crate::bindings::trellis::host::models,
        "trellis:host/programs@0.2.0": crate::bindings::trellis::host::programs,
    },
    pub_export_macro: true,
    export_macro_name: "export_policy",
    default_bindings_module: "trellis_guest::policy::bindings",
    additional_derives: [PartialEq],
    // It holds a program's numbers by handles of types that are not compared.
    additional_derives_ignore: ["front", "tokenizer"],
});

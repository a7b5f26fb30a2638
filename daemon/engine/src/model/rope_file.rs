//! RoPE settings of `config.json`, in the form that transformers 5 writes and in the one before it.

use super::config::{RopeConfig, RopeScaling};
use super::config_file::N_POSITIONS_MAX;
use super::error::ModelError;
use super::fields::Fields;

pub(crate) const THETA_DEFAULT: f64 = 10_000.0;
pub(crate) const THETA_MAX: f64 = 1e12;
pub(crate) const FACTOR_MAX: f64 = 1e6;
const KINDS: &str = "\"default\", \"linear\", \"dynamic\" or \"llama3\"";

/// Reads `rope_parameters`, or `rope_theta` with `rope_scaling`.
///
/// # Errors
///
/// [`ModelError::Field`] for another kind of scaling, and for parameters that are missing or out of range.
pub(crate) fn rope_config(fields: &Fields) -> Result<RopeConfig, ModelError> {
    let newer = fields.object("rope_parameters", "rope_parameters.")?;
    let scaling = match newer {
        Some(newer) => Some(newer),
        None => fields.object("rope_scaling", "rope_scaling.")?,
    };
    for scope in [Some(*fields), scaling].into_iter().flatten() {
        if scope.number("partial_rotary_factor", 0.0, 1.0)?.is_some_and(|factor| factor != 1.0) {
            return Err(scope.error("partial_rotary_factor", "1.0: all of a head is rotated"));
        }
    }
    let theta = match newer {
        Some(newer) => newer.number("rope_theta", 1.0, THETA_MAX)?,
        None => None,
    };
    let theta = match theta {
        Some(theta) => theta,
        None => fields.number("rope_theta", 1.0, THETA_MAX)?.unwrap_or(THETA_DEFAULT),
    };
    let scaling = match scaling {
        Some(scaling) => rope_scaling(&scaling)?,
        None => RopeScaling::Default,
    };
    Ok(RopeConfig { theta, scaling })
}

fn rope_scaling(fields: &Fields) -> Result<RopeScaling, ModelError> {
    let key = if fields.has("rope_type") { "rope_type" } else { "type" };
    let factor = || fields.required_number("factor", 1.0, FACTOR_MAX);
    match fields.text(key)? {
        Some("default") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
        Some("dynamic") => Ok(RopeScaling::Dynamic { factor: factor()? }),
        Some("llama3") => {
            let low_freq_factor = fields.required_number("low_freq_factor", 1e-6, FACTOR_MAX)?;
            let high_freq_factor = fields.required_number("high_freq_factor", 1e-6, FACTOR_MAX)?;
            if high_freq_factor <= low_freq_factor {
                let expected = format!("more than low_freq_factor, which is {low_freq_factor}");
                return Err(fields.error("high_freq_factor", expected));
            }
            let original_n_positions =
                fields.required_count("original_max_position_embeddings", 1, N_POSITIONS_MAX)?;
            Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor,
                high_freq_factor,
                original_n_positions,
            })
        }
        // transformers 5 writes `rope_parameters` with a base alone for the default form.
        None if !fields.has("factor") => Ok(RopeScaling::Default),
        _ => Err(fields.error(key, KINDS)),
    }
}

//! Data types and quantisation by the names that other trainers give them.

use serde_json::Value;

use super::error::ImportError;
use super::mapping::Mapping;

/// Writes `base.dtype` of a key such as `mixed_precision`.
pub(super) fn write_dtype(
    mapping: &mut Mapping,
    from: &str,
    default: &'static str,
) -> Result<(), ImportError> {
    let typed = mapping.config.text(from)?;
    let dtype = match typed.as_deref().unwrap_or(default).to_lowercase().as_str() {
        "bf16" | "bfloat16" | "bfloat_16" => "bf16",
        "fp16" | "float16" | "float_16" | "f16" | "half" => "f16",
        "no" | "fp32" | "float32" | "float_32" | "f32" | "float" => "f32",
        other => {
            let value = Value::from(other);
            return Err(mapping.config.refuse(from, &value, "bf16, fp16 or fp32"));
        }
    };
    mapping.set_or("base.dtype", typed.map(|_| dtype), dtype, from);
    Ok(())
}

/// hearth's format for weights of another's, and whether that is the same one.
pub(super) fn quantisation(name: &str) -> Option<(&'static str, bool)> {
    let name = name.to_lowercase();
    let name = name.split('|').next().unwrap_or_default();
    let has = |part: &str| name.contains(part);
    match () {
        () if has("nf4") || has("nfloat_4") => Some(("nf4", true)),
        () if has("fp8") || has("float8") || has("float_8") => Some(("fp8", true)),
        // Activations are quantised as well there.
        () if has("w8a8") => Some((if has("int") { "int8" } else { "fp8" }, false)),
        () if has("int8") || has("uint8") || has("int_8") || has("gguf") => {
            Some(("int8", has("int8") || has("int_8")))
        }
        () if ["int2", "int3", "int4", "uint", "fp4", "float4"].iter().any(|part| has(part)) => {
            Some(("nf4", false))
        }
        () => None,
    }
}

/// Writes `base.quantise` or `base.quantise_encoders` of a key that names a format; none of that says so.
pub(super) fn write_quantisation(
    mapping: &mut Mapping,
    key: &'static str,
    name: Option<&str>,
    from: &str,
) {
    let Some(name) = name else {
        mapping.set_default(key, "none", from);
        return;
    };
    match quantisation(name) {
        Some((format, is_same)) => {
            if name.to_lowercase().contains("w8a8") {
                mapping.differs(from, "weights are quantised alone, there what goes into them too");
            } else if !is_same {
                mapping.differs(from, format!("{format} is the nearest of int8, nf4 and fp8"));
            }
            mapping.set(key, format, from);
        }
        None => mapping.set(key, "none", from),
    }
}

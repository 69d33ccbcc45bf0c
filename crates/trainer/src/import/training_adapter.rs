//! Adapters that other trainers merge into the base while they train: in hearth one acts beside it, and not in samples.

use super::mapping::Mapping;

/// Those for Z-Image Turbo lie in one repository.
pub(super) const Z_IMAGE_TURBO_ADAPTERS: &str = "ostris/zimage_turbo_training_adapter";

/// Writes the adapter. Called when the kind of what is trained has been written.
pub(super) fn write(mapping: &mut Mapping, path: &str, from: &str) {
    if tell_alone(mapping, from) {
        mapping.set("base.training_adapter", path, from);
    }
}

/// The same where no key names it.
pub(super) fn write_default(mapping: &mut Mapping, path: &str, from: &str) {
    if tell_alone(mapping, from) {
        mapping.set_default("base.training_adapter", path, from);
    }
}

/// Whether a LoRA is trained, beside which alone it acts; refuses it otherwise.
fn tell_alone(mapping: &mut Mapping, from: &str) -> bool {
    let is_lora = mapping.value("adapter.kind").is_none_or(|kind| kind == "lora");
    if !is_lora {
        mapping.refuse(
            from,
            "an adapter acts in training beside a LoRA alone (base.training_adapter)",
        );
    }
    is_lora
}

//! The id of the start of the machine.

/// The id of the system's current start, as kubelets report it; empty if the system does not tell it.
pub(crate) fn boot_id() -> String {
    #[cfg(windows)]
    return tortie_hcn::native::boot_id().map(|id| id.to_string()).unwrap_or_default();
    #[cfg(not(windows))]
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

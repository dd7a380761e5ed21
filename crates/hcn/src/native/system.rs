//! What the registry tells about this Windows: its build, and how often it was started.

use std::ffi::c_void;

use windows_sys::Win32::System::Registry::{
    HKEY_LOCAL_MACHINE, REG_ROUTINE_FLAGS, RRF_RT_REG_DWORD, RRF_RT_REG_SZ, RegGetValueW,
};

const VERSION: &str = r"SOFTWARE\Microsoft\Windows NT\CurrentVersion";

/// The build of this Windows with its update, as in `20348.2762`. `None` if the system does not tell both.
#[must_use]
pub fn windows_build() -> Option<String> {
    // Windows writes at most five digits.
    let mut build = [0_u16; 16];
    let length = read(VERSION, "CurrentBuildNumber", RRF_RT_REG_SZ, &mut build)?;
    let units = build.iter().take(length / size_of::<u16>()).take_while(|unit| **unit != 0);
    let build = String::from_utf16(&units.copied().collect::<Vec<_>>()).ok()?;
    let is_number = !build.is_empty() && build.bytes().all(|byte| byte.is_ascii_digit());
    let update = number(VERSION, "UBR")?;
    is_number.then(|| format!("{build}.{update}"))
}

/// The number of this start of Windows, which kubelets report as the boot id of their Node
/// (`pkg/kubelet/winstats` of Kubernetes). `None` if Windows does not count.
#[must_use]
pub fn boot_id() -> Option<u32> {
    number(r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters", "BootId")
}

fn number(folder: &str, name: &str) -> Option<u32> {
    let mut number = [0_u32];
    read(folder, name, RRF_RT_REG_DWORD, &mut number)?;
    Some(number[0])
}

/// Reads a value of this type, and returns its length in bytes; `None` if there is no such value, or it is longer.
fn read<T: Copy>(folder: &str, name: &str, kind: REG_ROUTINE_FLAGS, value: &mut [T]) -> Option<usize> {
    let wide = |text: &str| text.encode_utf16().chain([0]).collect::<Vec<u16>>();
    let (folder, name) = (wide(folder), wide(name));
    let mut length = u32::try_from(size_of_val(value)).ok()?;
    // SAFETY: both names end with NUL; the result has room for as many bytes as the length says, and any bytes are numbers.
    let code = unsafe {
        RegGetValueW(
            HKEY_LOCAL_MACHINE,
            folder.as_ptr(),
            name.as_ptr(),
            kind,
            std::ptr::null_mut(),
            value.as_mut_ptr().cast::<c_void>(),
            &raw mut length,
        )
    };
    (code == 0).then_some(length as usize)
}

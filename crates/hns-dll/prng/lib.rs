//! `bcryptprimitives.dll` with the one function that Rust's and Go's libraries need, which Wine 8 lacks. It is compiled on its
//! own, because whatever uses Rust's library would import itself.
#![no_std]

use core::panic::PanicInfo;

#[link(name = "advapi32")]
unsafe extern "system" {
    /// `RtlGenRandom`.
    #[link_name = "SystemFunction036"]
    fn generate(buffer: *mut u8, length: u32) -> u8;
}

/// Fills a buffer with random bytes.
///
/// # Safety
/// The buffer has that length.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn ProcessPrng(buffer: *mut u8, length: usize) -> i32 {
    let Ok(length) = u32::try_from(length) else { return 0 };
    // SAFETY: the buffer has that length.
    i32::from(unsafe { generate(buffer, length) })
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {}
}

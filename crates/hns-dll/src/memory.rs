//! Texts, identifiers and results as C has them.

use std::ffi::c_void;

use tortie_hcn::{Failure, Guid};
use windows_sys::Win32::System::Com::CoTaskMemAlloc;

use crate::guid::RawGuid;

/// An open object, or a registration.
pub(crate) type Handle = *mut c_void;
/// A text that the caller frees with `CoTaskMemFree`.
pub(crate) type Text = *mut u16;

/// Reads a text; null is empty.
///
/// # Safety
/// The text is null or ends with NUL.
pub(crate) unsafe fn text(text: *const u16) -> String {
    if text.is_null() {
        return String::new();
    }
    let mut length = 0;
    // SAFETY: the text ends with NUL, and nothing behind it is read.
    while unsafe { *text.add(length) } != 0 {
        length += 1;
    }
    // SAFETY: these units were just read.
    String::from_utf16_lossy(unsafe { std::slice::from_raw_parts(text, length) })
}

/// Reads an identifier; null is none.
///
/// # Safety
/// The identifier is null or valid.
pub(crate) unsafe fn guid(guid: *const RawGuid) -> Guid {
    // SAFETY: it is null or valid.
    unsafe { guid.as_ref() }.copied().map(Guid::from).unwrap_or_default()
}

/// Writes a result, if the caller wants it.
///
/// # Safety
/// The place is null or valid.
pub(crate) unsafe fn give<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: it is valid, and its old value has no owner.
        unsafe { place.write(value) };
    }
}

/// Writes a text that the caller has to free.
///
/// # Safety
/// The place is null or valid.
pub(crate) unsafe fn give_text(place: *mut Text, text: &str) {
    if place.is_null() {
        return;
    }
    let units: Vec<u16> = text.encode_utf16().chain([0]).collect();
    // SAFETY: any size may be allocated.
    let copy = unsafe { CoTaskMemAlloc(units.len() * 2) }.cast::<u16>();
    if !copy.is_null() {
        // SAFETY: the new memory has room for all units.
        unsafe { copy.copy_from_nonoverlapping(units.as_ptr(), units.len()) };
    }
    // SAFETY: the place is valid.
    unsafe { place.write(copy) };
}

/// The code of a failure, whose record the caller gets. A success has no record: clients take any text as a failure.
///
/// # Safety
/// The place is null or valid.
pub(crate) unsafe fn outcome(result: Result<(), Failure>, record: *mut Text) -> i32 {
    match result {
        Ok(()) => {
            // SAFETY: the place is null or valid.
            unsafe { give(record, std::ptr::null_mut()) };
            0
        }
        Err(failure) => {
            // SAFETY: the place is null or valid.
            unsafe { give_text(record, &failure.record) };
            failure.code.0.cast_signed()
        }
    }
}

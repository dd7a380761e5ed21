//! The functions of the host compute service (HCS) in `vmcompute.dll` by which hcsshim's `HotAttachEndpoint` attaches an endpoint
//! to a running container (`internal/vmcompute` of hcsshim).
//!
//! All pointers are as for the functions of HNS.
#![allow(non_snake_case, reason = "the names are those of Windows")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::json;
use tortie_hcn::{Failure, HResult};

use crate::client;
use crate::memory::{Handle, Text, give, give_text, outcome, text};

/// The containers behind the open handles, and the newest handle.
static CONTAINERS: Mutex<(usize, BTreeMap<usize, String>)> = Mutex::new((0, BTreeMap::new()));

fn containers() -> MutexGuard<'static, (usize, BTreeMap<usize, String>)> {
    CONTAINERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn container(handle: Handle) -> Result<String, Failure> {
    let found = containers().1.get(&handle.addr()).cloned();
    found.ok_or_else(|| Failure::new(HResult::E_INVALIDARG, "this is no open handle of a container"))
}

/// Opens a running container.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcsOpenComputeSystem(
    id: *const u16,
    handle: *mut Handle,
    record: *mut Text,
) -> i32 {
    // SAFETY: the pointers are as documented.
    let id = unsafe { text(id) };
    let opened = client::emulator("open-container", &json!({"Id": id})).map(|_| {
        let mut containers = containers();
        containers.0 += 1;
        let number = containers.0;
        containers.1.insert(number, id);
        // SAFETY: the place is valid or null.
        unsafe { give(handle, std::ptr::without_provenance_mut(number)) }
    });
    // SAFETY: the pointers are as documented.
    unsafe { outcome(opened, record) }
}

/// Closes a handle.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcsCloseComputeSystem(handle: Handle) -> i32 {
    let closed = container(handle).map(|_| drop(containers().1.remove(&handle.addr())));
    // SAFETY: nobody wants an error record.
    unsafe { outcome(closed, std::ptr::null_mut()) }
}

/// Says what kind of system this is. The other properties are left out.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcsGetComputeSystemProperties(
    handle: Handle,
    _query: *const u16,
    properties: *mut Text,
    record: *mut Text,
) -> i32 {
    let said = container(handle).map(|id| {
        let document =
            json!({"Id": id, "SystemType": "Container", "RuntimeOsType": "Windows", "State": "Running"});
        // SAFETY: the place is valid or null.
        unsafe { give_text(properties, &document.to_string()) }
    });
    // SAFETY: the pointers are as documented.
    unsafe { outcome(said, record) }
}

/// Attaches endpoints to a container, or detaches them.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcsModifyComputeSystem(
    handle: Handle,
    configuration: *const u16,
    record: *mut Text,
) -> i32 {
    // SAFETY: the pointers are as documented.
    let request = unsafe { text(configuration) };
    let modify = || {
        let id = container(handle)?;
        client::emulator("modify-container", &json!({"Id": id, "Request": request})).map(drop)
    };
    // SAFETY: the pointers are as documented.
    unsafe { outcome(modify(), record) }
}

/// Registers a callback, which is never called: no client of the emulator waits for the end of a container.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcsRegisterComputeSystemCallback(
    handle: Handle,
    _callback: *const c_void,
    _context: *const c_void,
    registration: *mut Handle,
) -> i32 {
    // SAFETY: the place is valid or null.
    let registered = container(handle).map(|_| unsafe { give(registration, handle) });
    // SAFETY: nobody wants an error record.
    unsafe { outcome(registered, std::ptr::null_mut()) }
}

/// Ends the registration of a callback.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcsUnregisterComputeSystemCallback(_registration: Handle) -> i32 {
    0
}

//! Callbacks for the notifications of the emulated HNS, which one thread waits for.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use serde::Deserialize;
use serde_json::json;
use tortie_hcn::{Failure, HResult};

use crate::client::emulator;
use crate::memory::Handle;

pub(crate) type Callback = unsafe extern "system" fn(u32, *const c_void, i32, *const u16);

/// `HcnNotificationServiceDisconnect`.
const SERVICE_DISCONNECT: u32 = 0x0100_0000;

#[derive(Clone, Copy)]
struct Registration {
    number: usize,
    callback: Callback,
    /// The address of the caller's context.
    context: usize,
}

static REGISTERED: Mutex<Registered> = Mutex::new(Registered { all: Vec::new(), last: 0, has_thread: false });

struct Registered {
    all: Vec<Registration>,
    last: usize,
    has_thread: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    next: u64,
    notifications: Vec<Notification>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Notification {
    r#type: u32,
    data: String,
}

/// Registers a callback while the emulated HNS is there.
pub(crate) fn register(callback: Callback, context: *const c_void) -> Result<Handle, Failure> {
    // What was before does not interest it.
    let next = wait(None)?.next;
    let mut registered = registered();
    registered.last += 1;
    let number = registered.last;
    registered.all.push(Registration { number, callback, context: context.expose_provenance() });
    if !registered.has_thread {
        let started =
            thread::Builder::new().name("hns-notifications".to_owned()).spawn(move || deliver(next));
        started.map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))?;
        registered.has_thread = true;
    }
    Ok(std::ptr::without_provenance_mut(number))
}

/// Ends a registration.
pub(crate) fn unregister(handle: Handle) {
    registered().all.retain(|registration| registration.number != handle.addr());
}

/// Delivers until the connection is lost, or HNS says that it ends. Registrations end with it.
fn deliver(mut next: u64) {
    loop {
        let Ok(answer) = wait(Some(next)) else { break end_all() };
        next = answer.next;
        for notification in answer.notifications {
            if notification.r#type == SERVICE_DISCONNECT {
                return end_all();
            }
            let all = registered().all.clone();
            all.iter().for_each(|registration| notify(registration, notification.r#type, &notification.data));
        }
    }
}

fn end_all() {
    let all = {
        let mut registered = registered();
        registered.has_thread = false;
        std::mem::take(&mut registered.all)
    };
    all.iter().for_each(|registration| notify(registration, SERVICE_DISCONNECT, "{}"));
}

fn notify(registration: &Registration, kind: u32, data: &str) {
    let data: Vec<u16> = data.encode_utf16().chain([0]).collect();
    let context = std::ptr::with_exposed_provenance(registration.context);
    // SAFETY: whoever registered the callback keeps it and its context valid until it is unregistered; the text ends with
    // NUL and lives longer than the call.
    unsafe { (registration.callback)(kind, context, 0, data.as_ptr()) };
}

/// Waits for notifications from that one on. Without a number, returns at once.
fn wait(next: Option<u64>) -> Result<Answer, Failure> {
    let answer = emulator("notifications", &json!({"Next": next}))?;
    serde_json::from_str(&answer).map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))
}

fn registered() -> MutexGuard<'static, Registered> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

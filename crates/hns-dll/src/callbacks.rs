//! Callbacks for the notifications of the emulated HNS, which one thread waits for.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use serde::Deserialize;
use serde_json::json;
use tortie_hcn::{Failure, Guid, HResult};

use crate::client::emulator;
use crate::memory::Handle;
use crate::notifications::{Notification, SERVICE_DISCONNECT};

pub(crate) type Callback = unsafe extern "system" fn(u32, *const c_void, i32, *const u16);

#[derive(Clone, Copy)]
struct Registration {
    number: usize,
    /// The guest network service that it is about, if it is about one.
    service: Option<Guid>,
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

/// Registers a callback while the emulated HNS is there: for all notifications, or for those of a guest network service.
pub(crate) fn register(
    callback: Callback,
    context: *const c_void,
    service: Option<Guid>,
) -> Result<Handle, Failure> {
    // What was before does not interest it.
    let next = wait(None)?.next;
    let mut registered = registered();
    registered.last += 1;
    let number = registered.last;
    let context = context.expose_provenance();
    registered.all.push(Registration { number, service, callback, context });
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
            let concerned = all.iter().filter(|registration| notification.concerns(registration.service));
            concerned.for_each(|registration| notify(registration, notification.r#type, &notification.data));
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

//! Notifications of HNS, by `HcnRegisterServiceCallback`.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tracing::{debug, info, warn};

use super::functions::{Handle, RegisterFunction};
use crate::HResult;

/// The delay before another attempt to register with an HNS that is not there.
const RETRY: Duration = Duration::from_millis(500);

/// `HcnNotificationNetworkCreate`.
const NETWORK_CREATE: u32 = 0x2;
/// `HcnNotificationNetworkDelete`.
const NETWORK_DELETE: u32 = 0x4;
/// `HcnNotificationServiceDisconnect`.
const SERVICE_DISCONNECT: u32 = 0x0100_0000;

/// Whom to tell.
#[derive(Default)]
pub(super) struct Watchers(Mutex<Vec<Box<dyn Fn() + Send>>>);

impl Watchers {
    /// Returns whether it is the first.
    pub(super) fn add(&self, notify: Box<dyn Fn() + Send>) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(notify);
        all.len() == 1
    }

    pub(super) fn tell(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|notify| notify());
    }
}

/// What the callback gets. It lives as long as the process, because HNS may call at any time.
struct Context {
    watchers: &'static Watchers,
    /// Receives a message when the registration has ended.
    disconnected: Mutex<Sender<()>>,
}

/// Registers a callback, and again after each restart of HNS, until the process ends.
///
/// # Errors
/// There is no thread.
pub(super) fn start(register: RegisterFunction, watchers: &'static Watchers) -> std::io::Result<()> {
    let (disconnected, ended) = std::sync::mpsc::channel();
    let context = Box::leak(Box::new(Context { watchers, disconnected: Mutex::new(disconnected) }));
    let body = move || keep_registered(register, context, ended);
    thread::Builder::new().name("hcn-notifications".to_owned()).spawn(body).map(drop)
}

#[allow(clippy::needless_pass_by_value, reason = "the thread owns it")]
fn keep_registered(register: RegisterFunction, context: &'static Context, ended: Receiver<()>) {
    loop {
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the context lives for ever; the result is a place for a pointer.
        let code = unsafe { register(notified, std::ptr::from_ref(context).cast(), &raw mut handle) };
        if code < 0 {
            debug!(code = %HResult(code.cast_unsigned()), "HNS takes no callback; Tortie retries");
            thread::sleep(RETRY);
            continue;
        }
        info!("HNS sends its notifications");
        // Something may have happened before.
        context.watchers.tell();
        if ended.recv().is_err() {
            return;
        }
        // The registration went away with the service, so there is nothing to close.
        warn!("HNS has ended; its objects are checked when it is back");
    }
}

/// # Safety
/// `context` is a [`Context`] that lives for ever.
unsafe extern "system" fn notified(kind: u32, context: *const c_void, _status: i32, _data: *const u16) {
    // SAFETY: see above.
    let context = unsafe { &*context.cast::<Context>() };
    match kind {
        NETWORK_CREATE | NETWORK_DELETE => context.watchers.tell(),
        SERVICE_DISCONNECT => {
            let disconnected = context.disconnected.lock().unwrap_or_else(PoisonError::into_inner);
            // The other end lives as long as the process.
            let _ = disconnected.send(());
            drop(disconnected);
            context.watchers.tell();
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    /// The registered context, and how often the fake HNS was asked.
    static CONTEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    /// Fails at first, and whenever it was asked for the third time.
    unsafe extern "system" fn register(
        callback: super::super::functions::Callback,
        context: *const c_void,
        _: *mut Handle,
    ) -> i32 {
        assert!(callback as usize == notified as *const () as usize);
        if ASKED.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
            return HResult::RPC_S_SERVER_UNAVAILABLE.0.cast_signed();
        }
        CONTEXT.store(context.cast_mut(), Ordering::SeqCst);
        0
    }

    #[test]
    fn a_restart_leads_to_a_new_registration_and_networks_are_told() {
        let watchers: &'static Watchers = Box::leak(Box::default());
        let (tell, told) = channel();
        assert!(watchers.add(Box::new(move || {
            let _ = tell.send(());
        })));
        start(register, watchers).unwrap();
        let long = Duration::from_secs(60);
        told.recv_timeout(long).expect("the first registration");
        assert_eq!(ASKED.load(Ordering::SeqCst), 2);
        let notify = |kind| {
            // SAFETY: the context is the one that was registered.
            unsafe { notified(kind, CONTEXT.load(Ordering::SeqCst), 0, std::ptr::null()) }
        };
        for (kind, expected) in [(NETWORK_CREATE, true), (NETWORK_DELETE, true), (5, false), (9, false)] {
            notify(kind);
            assert_eq!(told.try_recv().is_ok(), expected, "{kind}");
        }
        notify(SERVICE_DISCONNECT);
        told.recv_timeout(long).expect("the end of the service");
        told.recv_timeout(long).expect("the second registration");
        assert_eq!(ASKED.load(Ordering::SeqCst), 4);
    }
}

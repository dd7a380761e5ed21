//! The event log of this machine.

use std::ffi::c_void;
use std::io;
use std::ptr;

use windows_sys::Win32::Foundation::{HANDLE, NO_ERROR};
use windows_sys::Win32::System::EventLog::{
    EVENTLOG_ERROR_TYPE, EVENTLOG_INFORMATION_TYPE, RegisterEventSourceW, ReportEventW,
};
use windows_sys::Win32::System::Registry::{
    HKEY, HKEY_LOCAL_MACHINE, KEY_SET_VALUE, REG_DWORD, REG_EXPAND_SZ, REG_OPTION_NON_VOLATILE, RegCloseKey,
    RegCreateKeyExW, RegSetValueExW,
};

/// A program of Windows whose messages 1 to 1000 are the text of the event itself.
const MESSAGES: &str = r"%SystemRoot%\System32\EventCreate.exe";
/// The number of the message.
const EVENT: u32 = 1;
/// Errors, warnings and information.
const TYPES: u32 = 7;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Something does not work.
    Error,
    /// Something happened.
    Information,
}

/// A source of events in the log `Application`.
#[derive(Debug)]
pub struct EventLog(HANDLE);

// SAFETY: the handle is used by functions that any thread may call.
unsafe impl Send for EventLog {}
// SAFETY: as above.
unsafe impl Sync for EventLog {}

impl EventLog {
    /// Registers the source, and opens the log.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn open(source: &str) -> io::Result<EventLog> {
        register(source)?;
        let source = utf16(source);
        // SAFETY: the name ends with NUL, and null means this machine.
        let handle = unsafe { RegisterEventSourceW(ptr::null(), source.as_ptr()) };
        if handle.is_null() { Err(io::Error::last_os_error()) } else { Ok(EventLog(handle)) }
    }

    /// Adds an event.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn report(&self, kind: EventKind, text: &str) -> io::Result<()> {
        let kind = match kind {
            EventKind::Error => EVENTLOG_ERROR_TYPE,
            EventKind::Information => EVENTLOG_INFORMATION_TYPE,
        };
        let text = utf16(text);
        let texts = [text.as_ptr()];
        let (no_user, no_data): (*mut c_void, *const c_void) = (ptr::null_mut(), ptr::null());
        // SAFETY: the handle is open as long as the process lives; there is one text, which ends with NUL.
        let reported =
            unsafe { ReportEventW(self.0, kind, 0, EVENT, no_user, 1, 0, texts.as_ptr(), no_data) };
        if reported == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Tells the system where the text of messages comes from.
fn register(source: &str) -> io::Result<()> {
    let path = utf16(&format!(r"SYSTEM\CurrentControlSet\Services\EventLog\Application\{source}"));
    let mut key: HKEY = ptr::null_mut();
    // SAFETY: the path ends with NUL, and the place for the key is valid; the rest is absent.
    let code = unsafe {
        RegCreateKeyExW(
            HKEY_LOCAL_MACHINE,
            path.as_ptr(),
            0,
            ptr::null(),
            REG_OPTION_NON_VOLATILE,
            KEY_SET_VALUE,
            ptr::null(),
            &raw mut key,
            ptr::null_mut(),
        )
    };
    outcome(code)?;
    let messages: Vec<u8> = utf16(MESSAGES).iter().flat_map(|unit| unit.to_le_bytes()).collect();
    let set = set(key, "EventMessageFile", REG_EXPAND_SZ, &messages)
        .and_then(|()| self::set(key, "TypesSupported", REG_DWORD, &TYPES.to_le_bytes()));
    // SAFETY: the key is open, and closed once.
    unsafe { RegCloseKey(key) };
    set
}

fn set(key: HKEY, name: &str, kind: u32, data: &[u8]) -> io::Result<()> {
    let name = utf16(name);
    let length = u32::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the key is open, the name ends with NUL, and the data has that many bytes.
    outcome(unsafe { RegSetValueExW(key, name.as_ptr(), 0, kind, data.as_ptr(), length) })
}

fn outcome(code: u32) -> io::Result<()> {
    if code == NO_ERROR { Ok(()) } else { Err(io::Error::from_raw_os_error(code as i32)) }
}

/// The text, ending with NUL. One within ends it.
fn utf16(text: &str) -> Vec<u16> {
    text.encode_utf16().take_while(|unit| *unit != 0).chain([0]).collect()
}

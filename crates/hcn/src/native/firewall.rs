//! The firewall of this machine, by COM. `windows-sys` has no interfaces of COM, so methods are called by their places in the tables
//! of `netfw.h`.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use windows_sys::Win32::Foundation::{
    E_NOINTERFACE, E_NOTIMPL, E_POINTER, REGDB_E_CLASSNOTREG, RPC_E_CHANGED_MODE, SysAllocStringLen,
    SysFreeString, SysStringLen,
};
use windows_sys::Win32::System::Com::{
    CLSCTX_INPROC_SERVER, COINIT_MULTITHREADED, CoCreateInstance, CoInitializeEx, CoUninitialize,
};
use windows_sys::core::{BSTR, GUID};

use crate::{Firewall, FirewallError, FirewallRule, HResult, LocalRules};

const POLICY_CLASS: GUID = GUID::from_u128(0xe2b3c97f_6ae1_41ac_817a_f6f92166d7dd);
const POLICY: GUID = GUID::from_u128(0x98325047_c671_4174_8d81_defcd3f03186);
const RULE_CLASS: GUID = GUID::from_u128(0x2c5bc43e_3369_4c33_ab0c_be9469677af4);
const RULE: GUID = GUID::from_u128(0xaf230d27_baba_4e42_aced_f524f22cfce2);
const ENUMERATION: GUID = GUID::from_u128(0x00020404_0000_0000_c000_000000000046);

/// Places of methods. Those of `IUnknown` and `IDispatch` come first.
mod method {
    pub(super) const QUERY_INTERFACE: usize = 0;
    pub(super) const RELEASE: usize = 2;
    /// `IEnumVARIANT::Next`.
    pub(super) const NEXT: usize = 3;
    /// Of `INetFwPolicy2`.
    pub(super) const RULES: usize = 18;
    pub(super) const LOCAL_POLICY_MODIFY_STATE: usize = 28;
    /// Of `INetFwRules`.
    pub(super) const ADD: usize = 8;
    pub(super) const REMOVE: usize = 9;
    pub(super) const ITEM: usize = 10;
    pub(super) const ENUMERATE: usize = 11;
    /// Of `INetFwRule`: the reader of each property; its writer comes next.
    pub(super) const NAME: usize = 7;
    pub(super) const DESCRIPTION: usize = 9;
    pub(super) const APPLICATION: usize = 11;
    pub(super) const SERVICE: usize = 13;
    pub(super) const PROTOCOL: usize = 15;
    pub(super) const LOCAL_PORTS: usize = 17;
    pub(super) const REMOTE_PORTS: usize = 19;
    pub(super) const LOCAL_ADDRESSES: usize = 21;
    pub(super) const REMOTE_ADDRESSES: usize = 23;
    pub(super) const DIRECTION: usize = 27;
    pub(super) const INTERFACE_TYPES: usize = 31;
    pub(super) const ENABLED: usize = 33;
    pub(super) const PROFILES: usize = 37;
    pub(super) const ACTION: usize = 41;
}

/// `NET_FW_RULE_DIR_IN` and `NET_FW_RULE_DIR_OUT`.
const IN: i32 = 1;
const OUT: i32 = 2;
/// `NET_FW_ACTION_ALLOW` and `NET_FW_ACTION_BLOCK`.
const ALLOW: i32 = 1;
const BLOCK: i32 = 0;
/// The type of a VARIANT that has an object (`VT_DISPATCH`).
const DISPATCH: u16 = 9;
/// `HRESULT_FROM_WIN32(ERROR_FILE_NOT_FOUND)`: no rule has the name.
const NOT_FOUND: HResult = HResult(0x8007_0002);

/// The firewall of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct NativeFirewall;

impl Firewall for NativeFirewall {
    fn rules(&self) -> Result<Vec<FirewallRule>, FirewallError> {
        with_policy("list its rules", |policy| {
            let rules = policy.object(method::RULES)?;
            let all = rules.object(method::ENUMERATE)?.cast(&ENUMERATION)?;
            let mut found = Vec::new();
            while let Some(rule) = all.next()? {
                found.push(read(&rule.cast(&RULE)?)?);
            }
            Ok(found)
        })
    }

    fn set(&self, rule: &FirewallRule) -> Result<(), FirewallError> {
        with_policy("take the rule", |policy| {
            let rules = policy.object(method::RULES)?;
            match rules.item(&rule.name) {
                Ok(found) => write(&found, rule),
                Err(NOT_FOUND) => {
                    let new = Com::create(&RULE_CLASS, &RULE)?;
                    write(&new, rule)?;
                    rules.with_object(method::ADD, &new)
                }
                Err(code) => Err(code),
            }
        })
    }

    fn remove(&self, name: &str) -> Result<(), FirewallError> {
        with_policy("remove the rule", |policy| policy.object(method::RULES)?.put_text(method::REMOVE, name))
    }

    fn local_rules(&self) -> Result<LocalRules, FirewallError> {
        with_policy("tell whether its rules apply", |policy| {
            Ok(match policy.number(method::LOCAL_POLICY_MODIFY_STATE)? {
                0 => LocalRules::Apply,
                2 => LocalRules::AllBlocked,
                _ => LocalRules::GroupPolicy,
            })
        })
    }
}

fn read(rule: &Com) -> Result<FirewallRule, HResult> {
    Ok(FirewallRule {
        name: rule.text(method::NAME)?,
        description: rule.text(method::DESCRIPTION)?,
        is_enabled: rule.truth(method::ENABLED)?,
        is_inbound: rule.number(method::DIRECTION)? == IN,
        allows: rule.number(method::ACTION)? == ALLOW,
        protocol: rule.number(method::PROTOCOL)?,
        local_ports: rule.text(method::LOCAL_PORTS)?,
        remote_ports: rule.text(method::REMOTE_PORTS)?,
        local_addresses: rule.text(method::LOCAL_ADDRESSES)?,
        remote_addresses: rule.text(method::REMOTE_ADDRESSES)?,
        application: rule.text(method::APPLICATION)?,
        service: rule.text(method::SERVICE)?,
        interface_types: rule.text(method::INTERFACE_TYPES)?,
        profiles: rule.number(method::PROFILES)?,
    })
}

/// Writes the properties. The ports need the protocol. A rule that is in force is so after each of them.
fn write(rule: &Com, wanted: &FirewallRule) -> Result<(), HResult> {
    let FirewallRule {
        name,
        description,
        is_enabled,
        is_inbound,
        allows,
        protocol,
        local_ports,
        remote_ports,
        local_addresses,
        remote_addresses,
        application,
        service,
        interface_types,
        profiles,
    } = wanted;
    rule.put_text(method::NAME + 1, name)?;
    rule.put_text(method::DESCRIPTION + 1, description)?;
    rule.put_number(method::DIRECTION + 1, if *is_inbound { IN } else { OUT })?;
    // Addresses before the action: a rule for everybody must not be in force meanwhile.
    rule.put_text(method::REMOTE_ADDRESSES + 1, remote_addresses)?;
    rule.put_text(method::LOCAL_ADDRESSES + 1, local_addresses)?;
    rule.put_number(method::PROTOCOL + 1, *protocol)?;
    rule.put_text(method::LOCAL_PORTS + 1, local_ports)?;
    rule.put_text(method::REMOTE_PORTS + 1, remote_ports)?;
    rule.put_text(method::INTERFACE_TYPES + 1, interface_types)?;
    // Empty texts are refused; a new rule has none of them.
    for (place, text) in [(method::APPLICATION, application), (method::SERVICE, service)] {
        if *text != rule.text(place)? {
            rule.put_text(place + 1, text)?;
        }
    }
    rule.put_number(method::PROFILES + 1, *profiles)?;
    rule.put_number(method::ACTION + 1, if *allows { ALLOW } else { BLOCK })?;
    rule.put_truth(method::ENABLED + 1, *is_enabled)
}

/// Does something with the firewall, on a thread that may use COM meanwhile.
fn with_policy<T>(
    operation: &'static str,
    work: impl FnOnce(&Com) -> Result<T, HResult>,
) -> Result<T, FirewallError> {
    // SAFETY: the reserved parameter is null; each success is followed by one CoUninitialize.
    let initialized = unsafe { CoInitializeEx(ptr::null(), COINIT_MULTITHREADED as u32) };
    let result = match initialized {
        // Another part of the process uses COM in another way, which serves as well.
        RPC_E_CHANGED_MODE | 0.. => Com::create(&POLICY_CLASS, &POLICY).and_then(|policy| work(&policy)),
        code => Err(HResult(code as u32)),
    };
    if initialized >= 0 {
        // SAFETY: see above; all objects are released.
        unsafe { CoUninitialize() };
    }
    // Wine has the interfaces, and implements none of them.
    const NONE: [HResult; 2] = [HResult(E_NOTIMPL as u32), HResult(REGDB_E_CLASSNOTREG as u32)];
    result.map_err(|code| match NONE.contains(&code) {
        true => FirewallError::None,
        false => FirewallError::Failed { operation, code },
    })
}

/// An object of COM.
struct Com(NonNull<c_void>);

/// A `VARIANT`.
#[repr(C)]
struct Variant {
    kind: u16,
    reserved: [u16; 3],
    value: [*mut c_void; 2],
}

/// A text of COM.
struct ComText(BSTR);

impl Drop for ComText {
    fn drop(&mut self) {
        // SAFETY: it was allocated so, or is null.
        unsafe { SysFreeString(self.0) }
    }
}

impl ComText {
    fn new(text: &str) -> Self {
        let units: Vec<u16> = text.encode_utf16().collect();
        // SAFETY: the units are copied.
        Self(unsafe { SysAllocStringLen(units.as_ptr(), units.len() as u32) })
    }

    fn read(&self) -> String {
        if self.0.is_null() {
            return String::new();
        }
        // SAFETY: the system tells its length.
        let units = unsafe { std::slice::from_raw_parts(self.0, SysStringLen(self.0) as usize) };
        String::from_utf16_lossy(units)
    }
}

fn check(code: i32) -> Result<(), HResult> {
    if code < 0 { Err(HResult(code as u32)) } else { Ok(()) }
}

fn given(code: i32, object: *mut c_void) -> Result<Com, HResult> {
    check(code)?;
    NonNull::new(object).map(Com).ok_or(HResult(E_POINTER as u32))
}

/// Calls the method at a place of an object's table. The caller knows its signature.
macro_rules! call {
    ($object:expr, $place:expr $(, $argument:expr => $type:ty)*) => {{
        let this = $object.0.as_ptr();
        // SAFETY: the object is alive, its table has the interface's methods, and the one at this place takes these arguments.
        unsafe {
            let table = *this.cast::<*const *const c_void>();
            let method: unsafe extern "system" fn(*mut c_void, $($type),*) -> i32 =
                std::mem::transmute(*table.add($place));
            method(this, $($argument),*)
        }
    }};
}

impl Com {
    fn create(class: &GUID, interface: &GUID) -> Result<Self, HResult> {
        let mut object = ptr::null_mut();
        // SAFETY: the class has the interface, and the place for the result is valid.
        let code = unsafe {
            CoCreateInstance(class, ptr::null_mut(), CLSCTX_INPROC_SERVER, interface, &raw mut object)
        };
        given(code, object)
    }

    fn cast(&self, interface: &GUID) -> Result<Self, HResult> {
        let mut object = ptr::null_mut();
        let code = call!(self, method::QUERY_INTERFACE, interface => *const GUID, &raw mut object => *mut *mut c_void);
        given(code, object)
    }

    fn object(&self, place: usize) -> Result<Self, HResult> {
        let mut object = ptr::null_mut();
        let code = call!(self, place, &raw mut object => *mut *mut c_void);
        given(code, object)
    }

    fn with_object(&self, place: usize, argument: &Self) -> Result<(), HResult> {
        check(call!(self, place, argument.0.as_ptr() => *mut c_void))
    }

    /// The rule of this name.
    fn item(&self, name: &str) -> Result<Self, HResult> {
        let (name, mut object) = (ComText::new(name), ptr::null_mut());
        let code = call!(self, method::ITEM, name.0 => BSTR, &raw mut object => *mut *mut c_void);
        given(code, object)
    }

    /// The next object of an enumeration.
    fn next(&self) -> Result<Option<Self>, HResult> {
        let mut variant = Variant { kind: 0, reserved: [0; 3], value: [ptr::null_mut(); 2] };
        let mut count = 0_u32;
        check(
            call!(self, method::NEXT, 1 => u32, &raw mut variant => *mut Variant, &raw mut count => *mut u32),
        )?;
        match (count, variant.kind) {
            (0, _) => Ok(None),
            (_, DISPATCH) => Ok(NonNull::new(variant.value[0]).map(Com)),
            _ => Err(HResult(E_NOINTERFACE as u32)),
        }
    }

    fn text(&self, place: usize) -> Result<String, HResult> {
        let mut text = ComText(ptr::null());
        check(call!(self, place, &raw mut text.0 => *mut BSTR))?;
        Ok(text.read())
    }

    fn put_text(&self, place: usize, text: &str) -> Result<(), HResult> {
        let text = ComText::new(text);
        check(call!(self, place, text.0 => BSTR))
    }

    fn number(&self, place: usize) -> Result<i32, HResult> {
        let mut number = 0_i32;
        check(call!(self, place, &raw mut number => *mut i32))?;
        Ok(number)
    }

    fn put_number(&self, place: usize, number: i32) -> Result<(), HResult> {
        check(call!(self, place, number => i32))
    }

    fn truth(&self, place: usize) -> Result<bool, HResult> {
        let mut truth = 0_i16;
        check(call!(self, place, &raw mut truth => *mut i16))?;
        Ok(truth != 0)
    }

    /// `VARIANT_TRUE` is -1.
    fn put_truth(&self, place: usize, truth: bool) -> Result<(), HResult> {
        check(call!(self, place, -i16::from(truth) => i16))
    }
}

impl Drop for Com {
    fn drop(&mut self) {
        // It returns how many references are left.
        let _ = call!(self, method::RELEASE);
    }
}

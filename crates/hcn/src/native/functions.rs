//! The functions of the two libraries (docs/hns.md, Calls; `api/hcn/Reference` of Microsoft's Virtualization-Documentation).

use std::ffi::c_void;

use crate::{Guid, Kind};

/// An object, or the registration of a callback, that the caller has to close.
pub(super) type Handle = *mut c_void;
/// A document in UTF-16 that the callee allocates with `CoTaskMemAlloc`, and the caller frees.
pub(super) type Text = *mut u16;

pub(super) type EnumerateFunction = unsafe extern "system" fn(*const u16, *mut Text, *mut Text) -> i32;
pub(super) type CreateFunction =
    unsafe extern "system" fn(*const RawGuid, *const u16, *mut Handle, *mut Text) -> i32;
pub(super) type CreateInFunction =
    unsafe extern "system" fn(Handle, *const RawGuid, *const u16, *mut Handle, *mut Text) -> i32;
pub(super) type OpenFunction = unsafe extern "system" fn(*const RawGuid, *mut Handle, *mut Text) -> i32;
pub(super) type ModifyFunction = unsafe extern "system" fn(Handle, *const u16, *mut Text) -> i32;
pub(super) type QueryFunction = unsafe extern "system" fn(Handle, *const u16, *mut Text, *mut Text) -> i32;
pub(super) type DeleteFunction = unsafe extern "system" fn(*const RawGuid, *mut Text) -> i32;
pub(super) type CloseFunction = unsafe extern "system" fn(Handle) -> i32;
pub(super) type HnsCallFunction =
    unsafe extern "system" fn(*const u16, *const u16, *const u16, *mut Text) -> i32;
pub(super) type Callback = unsafe extern "system" fn(u32, *const c_void, i32, *const u16);
pub(super) type RegisterFunction = unsafe extern "system" fn(Callback, *const c_void, *mut Handle) -> i32;
pub(super) type FreeFunction = unsafe extern "system" fn(*const c_void);

/// A GUID as C has it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawGuid(u32, u16, u16, [u8; 8]);

impl From<Guid> for RawGuid {
    fn from(guid: Guid) -> RawGuid {
        let [a, b, c, d, e, f, g, h, rest @ ..] = *guid.as_bytes();
        RawGuid(
            u32::from_be_bytes([a, b, c, d]),
            u16::from_be_bytes([e, f]),
            u16::from_be_bytes([g, h]),
            rest,
        )
    }
}

/// The functions for one kind of object.
#[derive(Clone, Copy)]
pub(super) struct ObjectFunctions {
    pub(super) enumerate: Option<EnumerateFunction>,
    pub(super) create: Option<CreateFunction>,
    pub(super) open: Option<OpenFunction>,
    pub(super) modify: Option<ModifyFunction>,
    pub(super) query: Option<QueryFunction>,
    pub(super) delete: Option<DeleteFunction>,
    pub(super) close: Option<CloseFunction>,
}

/// Everything that was found. Old builds of Windows lack some functions.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub(super) network: ObjectFunctions,
    /// Without [`ObjectFunctions::create`].
    pub(super) endpoint: ObjectFunctions,
    pub(super) namespace: ObjectFunctions,
    pub(super) load_balancer: ObjectFunctions,
    pub(super) sdn_route: ObjectFunctions,
    pub(super) guest_network_service: ObjectFunctions,
    pub(super) create_endpoint: Option<CreateInFunction>,
    pub(super) hns_call: Option<HnsCallFunction>,
    #[cfg_attr(not(windows), allow(dead_code, reason = "only a real library has it"))]
    pub(super) register: Option<RegisterFunction>,
    /// Frees a [`Text`].
    pub(super) free: FreeFunction,
}

impl Functions {
    pub(super) fn of(&self, kind: Kind) -> &ObjectFunctions {
        match kind {
            Kind::Network => &self.network,
            Kind::Endpoint => &self.endpoint,
            Kind::Namespace => &self.namespace,
            Kind::LoadBalancer => &self.load_balancer,
            Kind::SdnRoute => &self.sdn_route,
            Kind::GuestNetworkService => &self.guest_network_service,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_have_the_layout_of_c() {
        let guid: Guid = "00112233-4455-6677-8899-aabbccddeeff".parse().unwrap();
        let expected = RawGuid(0x0011_2233, 0x4455, 0x6677, [0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff]);
        assert_eq!(RawGuid::from(guid), expected);
    }
}

//! Error codes of calls (page `HCNHResult` of the HCN reference).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The result code of a call. Windows' text for a code depends on the system's language, so compare codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HResult(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal, $class:ident, $text:literal;)*) => {
        impl HResult {
            $(#[doc = $text] pub const $name: HResult = HResult($code);)*

            /// The code's name in the header, if it is known here.
            pub fn name(self) -> Option<&'static str> {
                match self { $(HResult::$name => Some(stringify!($name)),)* _ => None }
            }

            /// The meaning of the code in a few words.
            pub fn meaning(self) -> &'static str {
                match self { $(HResult::$name => $text,)* _ => "no meaning known here" }
            }

            /// What a caller may conclude.
            pub fn class(self) -> Class {
                match self {
                    $(HResult::$name => Class::$class,)*
                    // Every code of the RPC runtime: the service is absent, or disappeared during the call.
                    HResult(code) if (0x8007_06A4..=0x8007_0725).contains(&code) => Class::Unavailable,
                    _ => Class::Other,
                }
            }
        }

        #[cfg(test)]
        const CODES: &[(HResult, &str)] = &[$((HResult::$name, stringify!($name)),)*];
    };
}

codes! {
    S_OK = 0, Other, "success";
    E_NOTIMPL = 0x8000_4001, Other, "not implemented by this build";
    E_FAIL = 0x8000_4005, Other, "unspecified failure";
    E_ACCESSDENIED = 0x8007_0005, Unavailable, "access denied: run as LocalSystem or Administrator";
    ERROR_NOT_SUPPORTED = 0x8007_0032, Other, "not supported";
    E_INVALIDARG = 0x8007_0057, Other, "a parameter is incorrect";
    ERROR_ALREADY_EXISTS = 0x8007_00B7, AlreadyExists, "exists already";
    ERROR_SERVICE_DISABLED = 0x8007_0422, Unavailable, "the HNS service is disabled";
    ERROR_SERVICE_NOT_ACTIVE = 0x8007_0426, Unavailable, "the HNS service is not running";
    ERROR_NOT_FOUND = 0x8007_0490, NotFound, "element not found";
    ERROR_BUSY = 0x8007_00AA, Other, "an earlier change of the object is not finished; retry later";
    ERROR_TIMEOUT = 0x8007_05B4, Unavailable, "no answer within the deadline; the call may still take effect";
    RPC_S_SERVER_UNAVAILABLE = 0x8007_06BA, Unavailable, "the HNS service cannot be reached";
    RPC_S_CALL_FAILED = 0x8007_06BE, Unavailable, "the HNS service went away during the call, which may have taken effect";
    HCN_E_NETWORK_NOT_FOUND = 0x803B_0001, NotFound, "network not found";
    HCN_E_ENDPOINT_NOT_FOUND = 0x803B_0002, NotFound, "endpoint not found";
    HCN_E_LAYER_NOT_FOUND = 0x803B_0003, Other, "the network's layer was not found";
    HCN_E_SWITCH_NOT_FOUND = 0x803B_0004, Other, "virtual switch not found";
    HCN_E_SUBNET_NOT_FOUND = 0x803B_0005, Other, "the network has no subnet for this endpoint";
    HCN_E_ADAPTER_NOT_FOUND = 0x803B_0006, Other, "network adapter not found";
    HCN_E_PORT_NOT_FOUND = 0x803B_0007, Other, "switch port not found";
    HCN_E_POLICY_NOT_FOUND = 0x803B_0008, Other, "the policy was not found on the object";
    HCN_E_VFP_PORTSETTING_NOT_FOUND = 0x803B_0009, Other, "a needed VFP port setting is missing";
    HCN_E_INVALID_NETWORK = 0x803B_000A, Other, "the network's configuration is invalid or incomplete";
    HCN_E_INVALID_NETWORK_TYPE = 0x803B_000B, Other, "bad network type";
    HCN_E_INVALID_ENDPOINT = 0x803B_000C, Other, "the endpoint's configuration is invalid";
    HCN_E_INVALID_POLICY = 0x803B_000D, Other, "a policy's configuration is invalid";
    HCN_E_INVALID_POLICY_TYPE = 0x803B_000E, Other, "bad policy type";
    HCN_E_INVALID_REMOTE_ENDPOINT_OPERATION = 0x803B_000F, Other, "not valid on a remote endpoint";
    HCN_E_NETWORK_ALREADY_EXISTS = 0x803B_0010, AlreadyExists, "a network of this name exists";
    HCN_E_LAYER_ALREADY_EXISTS = 0x803B_0011, AlreadyExists, "the layer exists";
    HCN_E_POLICY_ALREADY_EXISTS = 0x803B_0012, AlreadyExists, "the object has this policy already";
    HCN_E_PORT_ALREADY_EXISTS = 0x803B_0013, AlreadyExists, "the port exists";
    HCN_E_ENDPOINT_ALREADY_ATTACHED = 0x803B_0014, AlreadyExists, "the endpoint is attached already";
    HCN_E_REQUEST_UNSUPPORTED = 0x803B_0015, Other, "request not supported";
    HCN_E_MAPPING_NOT_SUPPORTED = 0x803B_0016, Other, "port mappings are not supported on this network";
    HCN_E_DEGRADED_OPERATION = 0x803B_0017, Other, "the object is degraded";
    HCN_E_SHARED_SWITCH_MODIFICATION = 0x803B_0018, Other, "a switch that networks share cannot be changed";
    HCN_E_GUID_CONVERSION_FAILURE = 0x803B_0019, Other, "a parameter is not a GUID";
    HCN_E_REGKEY_FAILURE = 0x803B_001A, Other, "registry key failure";
    HCN_E_INVALID_JSON = 0x803B_001B, Other, "invalid JSON";
    HCN_E_INVALID_JSON_REFERENCE = 0x803B_001C, Other, "the document names an object that does not exist";
    HCN_E_ENDPOINT_SHARING_DISABLED = 0x803B_001D, Other, "endpoint sharing is disabled";
    HCN_E_INVALID_IP = 0x803B_001E, Other, "the address is invalid or in no subnet of the network";
    HCN_E_SWITCH_EXTENSION_NOT_FOUND = 0x803B_001F, Other, "switch extension not found";
    HCN_E_MANAGER_STOPPED = 0x803B_0020, Unavailable, "the service is stopping";
    GCN_E_MODULE_NOT_FOUND = 0x803B_0021, Other, "guest module not found";
    GCN_E_NO_REQUEST_HANDLERS = 0x803B_0022, Other, "the guest has no handler for the request";
    GCN_E_REQUEST_UNSUPPORTED = 0x803B_0023, Other, "the guest does not support the request";
    GCN_E_RUNTIMEKEYS_FAILED = 0x803B_0024, Other, "adding runtime keys to the container failed";
    GCN_E_NETADAPTER_TIMEOUT = 0x803B_0025, Other, "time-out while waiting for the adapter";
    GCN_E_NETADAPTER_NOT_FOUND = 0x803B_0026, Other, "adapter not found";
    GCN_E_NETCOMPARTMENT_NOT_FOUND = 0x803B_0027, Other, "compartment not found";
    GCN_E_NETINTERFACE_NOT_FOUND = 0x803B_0028, Other, "interface not found";
    GCN_E_DEFAULTNAMESPACE_EXISTS = 0x803B_0029, AlreadyExists, "the default namespace exists";
    HCN_E_ICS_DISABLED = 0x803B_002A, Other, "the ICS service is disabled";
    HCN_E_ENDPOINT_NAMESPACE_ALREADY_EXISTS = 0x803B_002B, AlreadyExists, "the endpoint is in a namespace already";
    HCN_E_ENTITY_HAS_REFERENCES = 0x803B_002C, Other, "still referenced, cannot be removed";
    HCN_E_INVALID_INTERNAL_PORT = 0x803B_002D, Other, "the internal port must not be zero";
    HCN_E_NAMESPACE_ATTACH_FAILED = 0x803B_002E, Other, "attaching to the namespace failed";
    HCN_E_ADDR_INVALID_OR_RESERVED = 0x803B_002F, Other, "the address is invalid or reserved";
    HCN_E_INVALID_PREFIX = 0x803B_0030, Other, "bad prefix";
    HCN_E_OBJECT_USED_AFTER_UNLOAD = 0x803B_0031, Other, "the object was torn down";
    HCN_E_INVALID_SUBNET = 0x803B_0032, Other, "the subnet's configuration is invalid";
    HCN_E_INVALID_IP_SUBNET = 0x803B_0033, Other, "the IP subnet's configuration is invalid";
    HCN_E_ENDPOINT_NOT_ATTACHED = 0x803B_0034, Other, "the endpoint must be attached first";
    HCN_E_ENDPOINT_NOT_LOCAL = 0x803B_0035, Other, "the endpoint must be local";
    HCN_INTERFACEPARAMETERS_ALREADY_APPLIED = 0x803B_0036, Other, "only one InterfaceParameters policy is possible";
    HCN_E_VFP_NOT_ALLOWED = 0x803B_0037, Other, "the network type needs VFP, which is not available";
}

impl HResult {
    /// Whether it says that a prerequisite of a network does not exist yet or is just changing: switch, port,
    /// adapter, VFP settings. HNS returns this for a while after a network was created or an adapter appeared
    /// (docs/hns.md, Calls); the same call succeeds later.
    pub fn is_not_ready(self) -> bool {
        const NOT_READY: [HResult; 7] = [
            HResult::HCN_E_SWITCH_NOT_FOUND,
            HResult::HCN_E_ADAPTER_NOT_FOUND,
            HResult::HCN_E_PORT_NOT_FOUND,
            HResult::HCN_E_VFP_PORTSETTING_NOT_FOUND,
            HResult::HCN_E_DEGRADED_OPERATION,
            HResult::GCN_E_NETADAPTER_TIMEOUT,
            HResult::GCN_E_NETADAPTER_NOT_FOUND,
        ];
        NOT_READY.contains(&self)
    }
}

impl fmt::Display for HResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} (0x{:08x}: {})", self.0, self.meaning()),
            None => write!(f, "0x{:08x}", self.0),
        }
    }
}

/// What a caller may conclude from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The object is absent. No other class means that.
    NotFound,
    /// The object, or one that it conflicts with, already exists.
    AlreadyExists,
    /// Nothing is known about the object, because the service did not answer. Retry, then read the state.
    Unavailable,
    /// The call was rejected.
    Other,
}

/// The error record that HNS returns in addition to the code (docs/hns.md, Calls).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ErrorRecord {
    /// The code again, unsigned.
    #[serde(default)]
    pub error_code: u32,
    /// A sentence, in the language of the system.
    #[serde(default)]
    pub error: String,
    /// False.
    #[serde(default)]
    pub success: bool,
}

/// A failed call: the code, and the error record if there is one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}{}{record}", if .record.is_empty() { "" } else { " " })]
pub struct Failure {
    /// The result code.
    pub code: HResult,
    /// The error record as text, empty if there is none. It should be an [`ErrorRecord`], but callers do not rely on
    /// it.
    pub record: String,
}

impl Failure {
    /// A failure whose error record has this message.
    pub fn new(code: HResult, error: impl Into<String>) -> Failure {
        let record = ErrorRecord { error_code: code.0, error: error.into(), success: false };
        Failure { code, record: serde_json::to_string(&record).unwrap_or_default() }
    }

    /// What a caller may conclude.
    pub fn class(&self) -> Class {
        self.code.class()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes() {
        let cases = [
            (0x8007_0490, Class::NotFound),
            (0x803B_0001, Class::NotFound),
            (0x803B_0002, Class::NotFound),
            // A missing policy, port or switch does not mean that the requested object is absent.
            (0x803B_0004, Class::Other),
            (0x803B_0008, Class::Other),
            (0x8007_00B7, Class::AlreadyExists),
            (0x803B_0010, Class::AlreadyExists),
            (0x803B_002B, Class::AlreadyExists),
            (0x8007_06BA, Class::Unavailable),
            (0x8007_06BF, Class::Unavailable),
            (0x8007_0422, Class::Unavailable),
            (0x8007_0005, Class::Unavailable),
            (0x8007_05B4, Class::Unavailable),
            (0x803B_0020, Class::Unavailable),
            (0x803B_000D, Class::Other),
            (0x1234_5678, Class::Other),
        ];
        for (code, class) in cases {
            assert_eq!(HResult(code).class(), class, "{}", HResult(code));
        }
    }

    #[test]
    fn hcn_codes_have_no_gaps_and_unique_names() {
        let hcn: Vec<u32> =
            CODES.iter().map(|(code, _)| code.0).filter(|code| code >> 16 == 0x803B).collect();
        assert_eq!(hcn, (0x803B_0001..=0x803B_0037).collect::<Vec<u32>>());
        assert_eq!(HResult::HCN_E_INVALID_JSON.name(), Some("HCN_E_INVALID_JSON"));
    }
}

//! Which notifications of HNS a callback gets (`HCN_NOTIFICATIONS` of the HCN reference).

use serde::Deserialize;
use tortie_hcn::Guid;

/// `HcnNotificationServiceDisconnect`.
pub(crate) const SERVICE_DISCONNECT: u32 = 0x0100_0000;
/// `HcnNotificationGuestNetworkServiceCreate`, `…Delete`, `…StateChanged` and `…InterfaceStateChanged`.
const OF_GUEST_NETWORK_SERVICES: [u32; 4] = [7, 8, 0x11, 0x12];

/// A notification of the emulated HNS.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Notification {
    pub(crate) r#type: u32,
    pub(crate) data: String,
}

impl Notification {
    /// Whether it is for callbacks of this guest network service, or of all of HNS.
    pub(crate) fn concerns(&self, guest_network_service: Option<Guid>) -> bool {
        #[derive(Deserialize)]
        struct Data {
            #[serde(rename = "ID")]
            id: Guid,
        }
        let Some(service) = guest_network_service else { return true };
        let data = serde_json::from_str::<Data>(&self.data);
        self.r#type == SERVICE_DISCONNECT
            || OF_GUEST_NETWORK_SERVICES.contains(&self.r#type) && data.is_ok_and(|data| data.id == service)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn callbacks_of_a_service_get_its_notifications() {
        let (one, other) = (Guid::random(), Guid::random());
        for (kind, id, gets) in [
            (0x11, one, true),
            (8, one, true),
            (0x11, other, false),
            // A network may have the same identifier.
            (2, one, false),
            (SERVICE_DISCONNECT, Guid::ZERO, true),
        ] {
            let notification = Notification { r#type: kind, data: json!({"ID": id, "Flags": 0}).to_string() };
            assert_eq!(notification.concerns(Some(one)), gets, "{kind:#x}");
            assert!(notification.concerns(None), "{kind:#x}");
        }
        let unreadable = Notification { r#type: 0x11, data: "{}".to_owned() };
        assert!(!unreadable.concerns(Some(one)));
    }
}

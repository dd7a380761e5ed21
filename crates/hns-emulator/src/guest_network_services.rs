//! Guest network services (page `HNS_Schema` of the HCN reference): stored, and without effect. No source names the number of a
//! state, or which changes HNS refuses.

use tortie_hcn::schema::{
    GuestNetworkService, GuestNetworkServiceState, ModifyGuestNetworkService, RequestType,
};
use tortie_hcn::{Failure, Guid, HResult};

use crate::check::{document, fail};
use crate::config::Config;
use crate::state::{CREATED, State, absent};

/// The states by their numbers.
const STATES: [GuestNetworkServiceState; 9] = [
    GuestNetworkServiceState::None,
    GuestNetworkServiceState::Created,
    GuestNetworkServiceState::Bootstrapping,
    GuestNetworkServiceState::Synchronized,
    GuestNetworkServiceState::Paused,
    GuestNetworkServiceState::Desynchronized,
    GuestNetworkServiceState::Rehydrating,
    GuestNetworkServiceState::Degraded,
    GuestNetworkServiceState::Destroyed,
];

impl State {
    pub(crate) fn create_guest_network_service(
        &mut self,
        id: Guid,
        text: &str,
        config: &Config,
    ) -> Result<Guid, Failure> {
        let mut service: GuestNetworkService = document(text, config.strict)?;
        service.id = self.new_id(id, service.id)?;
        service.base.state = Some(CREATED);
        let id = service.id;
        self.guest_network_services.insert(id, service.into());
        Ok(id)
    }

    pub(crate) fn modify_guest_network_service(
        &mut self,
        id: Guid,
        text: &str,
        config: &Config,
    ) -> Result<(), Failure> {
        self.guest_network_service(id)?;
        let request: ModifyGuestNetworkService = document(text, config.strict)?;
        if request.request_type != RequestType::Update {
            let error = format!("RequestType {} for a guest network service", request.request_type);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        let state = request.settings.state;
        let Some(number) = STATES.iter().position(|known| *known == state) else {
            return fail(HResult::HCN_E_INVALID_JSON, format!("State {state} of a guest network service"));
        };
        let mut changed = self.guest_network_service(id)?.clone();
        changed.base.state = u16::try_from(number).ok();
        self.guest_network_services.insert(id, changed.into());
        Ok(())
    }

    pub(crate) fn delete_guest_network_service(&mut self, id: Guid) -> Result<(), Failure> {
        self.guest_network_service(id)?;
        self.guest_network_services.remove(&id);
        Ok(())
    }

    pub(crate) fn guest_network_service(&self, id: Guid) -> Result<&GuestNetworkService, Failure> {
        let found = self.guest_network_services.get(&id).map(AsRef::as_ref);
        found.ok_or_else(|| absent(HResult::ERROR_NOT_FOUND, "guest network service", id))
    }
}

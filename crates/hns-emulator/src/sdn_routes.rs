//! Routes of several endpoints as objects of their own: stored unchanged, and without effect.

use tortie_hcn::schema::HostComputeRoute;
use tortie_hcn::{Failure, Guid, HResult};

use crate::check::document;
use crate::config::Config;
use crate::state::{State, absent};

impl State {
    pub(crate) fn create_route(&mut self, id: Guid, text: &str, config: &Config) -> Result<Guid, Failure> {
        let mut route: HostComputeRoute = document(text, config.strict)?;
        for endpoint in &route.host_compute_endpoints {
            self.endpoint(*endpoint)?;
        }
        route.id = self.new_id(id, route.id)?;
        let id = route.id;
        self.routes.insert(id, route.into());
        Ok(id)
    }

    pub(crate) fn delete_route(&mut self, id: Guid) -> Result<(), Failure> {
        self.route(id)?;
        self.routes.remove(&id);
        Ok(())
    }

    pub(crate) fn route(&self, id: Guid) -> Result<&HostComputeRoute, Failure> {
        let found = self.routes.get(&id).map(AsRef::as_ref);
        found.ok_or_else(|| absent(HResult::ERROR_NOT_FOUND, "route", id))
    }
}

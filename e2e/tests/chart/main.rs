//! The Helm chart: what it renders, what it refuses, and what a real API server says of it.

mod alerts;
mod api_server;
mod dashboards;
mod helm;
mod plugin;
mod refusals;
mod rendered;
mod rights;
mod server;

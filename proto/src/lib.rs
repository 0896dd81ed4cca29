//! placeholder of the room, filled below

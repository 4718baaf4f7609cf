"""What the peer of a connection may do: its user, roles, features, and the limits before a login."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from upper import kernel
from upper.server.auth import Role, Scram, User, Users
from upper.server.settings import PlainClients
from upper.server.transport import Transport
from upper.wire.codes import Feature

if TYPE_CHECKING:
    from upper.server.node import Node
    from upper.server.stream_session import StreamSession

log = logging.getLogger(__name__)


class PeerRights(Transport):
    """A transport whose peer may have logged in."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.loop)
        self.node: Node = node
        self.peer: str = "?"
        self.agent = ""  # what the client calls itself in HELLO
        self.user: User | None = None
        self.roles = Role.NONE if node.users else Role.everything()
        self.features: frozenset[int] = frozenset()
        self.scram: Scram | None = None
        self.failed_logins = 0
        self.sent_hello = False
        self.stream_session: StreamSession | None = None
        self.bytes_in = 0
        self._trusted = 0  # bytes received up to the end of the last login
        self._options = kernel.RunOptions(
            limit=node.settings.limits.item,
            # A plain memcached client until it names a partition or asks for the map: keys go by their hash.
            routed=node.settings.plain_clients is PlainClients.ROUTE,
            longest_lock=node.settings.limits.lock,
            expiring=node.bucket.expiring,
            counts=node.plain,
            timing=node.timings.run,
        )
        self._runs = False  # the kernel may answer
        self._choose_path()

    def login(self, user: User) -> None:
        self.user, self.roles = user, user.roles
        self.failed_logins = 0
        self._choose_path()

    def logout(self) -> None:
        """End the login, and the streams that were opened under it."""
        if self.user is not None:
            self._trusted = self.bytes_in
            if self.stream_session is not None:
                self.stream_session.revoke()
        self.user, self.roles = None, Role.NONE if self.node.users else Role.everything()
        self._choose_path()

    def reauthorize(self, users: Users) -> None:
        """The users were read again: take over new roles, or close if the login is no longer valid."""
        if self.user is None:
            return
        user = users.find(self.user.name)
        if user is None or user.secrets != self.user.secrets:
            log.info("%s: closed, the user %s was removed or has a new password", self.peer, self.user.name)
            self.abort()
        elif user.roles != self.roles:
            if self.stream_session is not None and Role.STREAM not in user.roles:
                self.stream_session.revoke()
            self.user, self.roles = user, user.roles
            self._choose_path()

    def agree(self, agent: str, features: frozenset[int]) -> None:
        """Store the outcome of HELLO."""
        self.agent, self.features, self.sent_hello = agent, features, True
        self._choose_path()

    @property
    def known(self) -> bool:
        """Whether the peer has logged in, or need not."""
        return self.user is not None or self.node.users is None

    @property
    def _largest(self) -> int:
        """Bytes of a packet that this peer may send; before a login, of all that it may send."""
        limits = self.node.settings.limits
        return limits.body if self.known else limits.before_login

    @property
    def routed(self) -> bool:
        """Whether the requests of this peer name no partition, so that keys go by their hash."""
        return self._options.routed

    def shows_partitions(self) -> None:
        """From here on the requests of this peer name partitions."""
        self._options.routed = False

    def _choose_path(self) -> None:
        """What the kernel may answer, and in which form."""
        options = self._options
        options.reads, options.writes = Role.READ in self.roles, Role.WRITE in self.roles
        options.delete_cas = self.sent_hello
        options.tokens = Feature.MUTATION_SEQNO in self.features
        options.json = Feature.JSON in self.features
        self._runs = options.reads or options.writes

"""Lists for thousands of tenants: no COUNT, indexed sorts and searches, bounded pages.

A list reads one row more than it shows, and so knows whether there is a next page. A search that
no index answers in time is cancelled: see `controlplane.operator.site`.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters, ShowFacets
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR
from django.core.paginator import InvalidPage, Page, Paginator
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from unfold.contrib.filters.admin import AutocompleteSelectFilter
from unfold.views import ChangeList

from controlplane.adapters.models import BaseModel
from controlplane.tenants.models import Tenant

#: A filter by tenant that searches instead of listing all of them.
TENANT = ("tenant", AutocompleteSelectFilter)
#: A later page costs as much as all before it.
MAX_PAGES = 200
#: Number of tenants, or people, whose names begin with the search term.
_MAX_OWNERS = 100


class AheadPage(Page):  # type: ignore[type-arg]
    """A page that knows whether there is another one."""

    is_more = False

    def has_next(self) -> bool:
        return self.is_more and self.number < MAX_PAGES


class AheadPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that reads one row more than a page has, instead of counting."""

    template_name = "operator/_list_pages.html"

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.num_pages * self.per_page

    @property
    def num_pages(self) -> int:  # type: ignore[override]
        return MAX_PAGES

    def page(self, number: Any) -> AheadPage:
        number = self.validate_number(number)
        first = (number - 1) * self.per_page
        rows = list(self.object_list[first : first + self.per_page + 1])
        page = AheadPage(rows[: self.per_page], number, self)
        page.is_more = len(rows) > self.per_page
        return page


class AheadChangeList(ChangeList):  # type: ignore[misc]
    """A list in pages of `AheadPaginator`; actions are for the rows of the page."""

    def get_results(self, request: HttpRequest) -> None:
        self.paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)
        try:
            self.page = self.paginator.page(self.page_num)
        except InvalidPage as error:
            raise IncorrectLookupParameters from error
        self.result_list = self.page.object_list
        # As if there were no other rows, so that no action is offered for all pages.
        self.result_count = self.full_result_count = len(self.result_list)
        self.show_full_result_count = self.can_show_all = False
        self.show_admin_actions = True
        self.multi_page = self.page.has_other_pages()
        self.first_row = (self.page_num - 1) * self.list_per_page + 1
        self.last_row = self.first_row + len(self.result_list) - 1
        self.newer_url = self._url(-1) if self.page.has_previous() else ""
        self.older_url = self._url(+1) if self.page.has_next() else ""

    def _url(self, step: int) -> str:
        return str(self.get_query_string({PAGE_VAR: self.page_num + step}))

    def get_ordering(self, request: HttpRequest, queryset: Any) -> Any:
        if not self.sortable_by:
            self.params.pop(ORDER_VAR, None)
        return super().get_ordering(request, queryset)


class BoundedList:
    """The base of this site's admin pages, with lists as in this module's docstring."""

    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    list_per_page = 50
    list_filter_submit = True
    paginator = AheadPaginator
    #: If not empty, Django shows a search box; `get_search_results` uses the next three.
    search_fields = ("pk",)
    #: Columns that an index sorts by.
    sortable_by: ClassVar[Iterable[str]] = ()
    #: Own columns with an index of prefixes.
    search_prefixes: ClassVar[tuple[str, ...]] = ()
    #: The path to a name that is unique within a tenant; it is searched as "tenant/name".
    search_name: ClassVar[str] = ""
    #: True if rows have a tenant, whose slug can be searched.
    search_tenants: ClassVar[bool] = True

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return AheadChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the rows whose indexed columns, or whose tenant's slug, begin with the term."""
        term = search_term.strip().replace("\0", "")
        if not term:
            return queryset, False
        slug, slash, name = term.partition("/")
        if slash and self.search_name:
            owners = list(Tenant.objects.filter(slug=slug).values_list("pk", flat=True))
            prefix = {f"{self.search_name}__startswith": name}
            return queryset.filter(tenant_id__in=owners, **prefix), False
        return queryset.filter(self.search_q(term)), False

    def search_q(self, term: str) -> Q:
        """Return the condition for rows that a term finds."""
        found = Q(pk__in=[])
        for column in self.search_prefixes:
            found |= Q(**{f"{column}__startswith": term})
        if self.search_tenants:
            tenants = Tenant.objects.filter(slug__startswith=term.lower()).order_by("slug")
            found |= Q(tenant_id__in=list(tenants.values_list("pk", flat=True)[:_MAX_OWNERS]))
        return found


class ChoiceFilter(admin.SimpleListFilter):
    """A filter by one of a few known values: it does not query the table for them."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset.filter(**{str(self.parameter_name): value}) if value else queryset


class BaseModelNameFilter(ChoiceFilter):
    """A filter by the base model's name, in tables that have it as text."""

    title, parameter_name = "base model", "base_model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = BaseModel.objects.order_by("name").values_list("name", flat=True)
        return [(name, name) for name in names[:_MAX_OWNERS]]


class SinceFilter(admin.SimpleListFilter):
    """A filter by the time of writing, which the index of time-ordered ids finds."""

    title, parameter_name = "written", "since"
    _HOURS: ClassVar[dict[str, int]] = {"hour": 1, "day": 24, "week": 7 * 24}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, f"In the last {name}") for name in self._HOURS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        hours = self._HOURS.get(self.value() or "")
        if hours is None:
            return queryset
        return queryset.filter(pk__gte=first_id(timezone.now() - dt.timedelta(hours=hours)))


def first_id(at: dt.datetime) -> uuid.UUID:
    """Return the lowest UUID of version 7 of a time."""
    return uuid.UUID(int=(int(at.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62))

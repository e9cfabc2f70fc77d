def prepare_schema(schema, *, path):
    return schema


def parser_limits():
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)
